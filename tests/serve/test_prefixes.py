"""Prompts on disk: there after a restart, bounded, and never damaged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("fastapi")

from longdraft import Request, Speculator
from longdraft.errors import CheckpointError
from longdraft.kv import snapshot
from longdraft.kv.prompt_cache import common_prefix
from longdraft.serve.prefixes import DiskPrefixes
from tests.tiny import tiny_model

MODEL = tiny_model(context=512)
SPEC = Speculator("ar", MODEL, plan="fixed")
TEXT = [(7 * i + i // 9) % 61 for i in range(400)]


def cache(folder: Path, most: int = 1 << 30, **more) -> DiskPrefixes:
    return DiskPrefixes(folder, SPEC.runner().fingerprint, most, **{"least_tokens": 16} | more)


def ask(kept: DiskPrefixes, prompt: list[int], slots: int = 2):
    session = SPEC.session(slots, context=450, cache=kept)
    number = session.add(Request(prompt, max_new_tokens=4, eos_token_ids=[]))
    while not session.ended(number):
        session.step()
    return session.take(number)


def keep_all(kept: DiskPrefixes) -> None:
    while kept.keep():
        pass


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def test_a_prompt_is_there_after_a_restart(tmp_path):
    first = cache(tmp_path)
    before = ask(first, TEXT[:200])
    keep_all(first)
    assert len(files(tmp_path)) == 1 and not first.keep()
    again = ask(cache(tmp_path), [*TEXT[:200], 5, 6])
    assert again.cached_tokens >= 200 and before.cached_tokens == 0
    assert (
        again.token_ids == SPEC.generate(Request([*TEXT[:200], 5, 6], max_new_tokens=4, eos_token_ids=[]))[0].token_ids
    )


def test_a_longer_text_takes_the_place_of_its_beginning(tmp_path):
    kept = cache(tmp_path)
    for n in (100, 300):
        ask(kept, TEXT[:n])
        keep_all(kept)
    (file,) = files(tmp_path)
    assert snapshot.token_count(file) >= 300


def test_all_files_together_are_bounded_and_the_one_not_used_for_longest_goes(tmp_path):
    one = 64 * SPEC.runner().kv_shape.bytes_per_token
    kept = cache(tmp_path, most=int(2.6 * one) + 9000)
    for shift in range(3):
        ask(kept, TEXT[100 * shift : 100 * shift + 60])
        keep_all(kept)
        assert sum(f.stat().st_size for f in files(tmp_path)) <= 2.6 * one + 9000
        if shift == 1:
            ask(cache(tmp_path), TEXT[:60])  # another start: the first is used once more
    assert len(files(tmp_path)) == 2


def test_a_text_that_is_larger_than_all_may_be_is_not_kept(tmp_path, caplog):
    kept = cache(tmp_path, most=5000)
    ask(kept, TEXT[:200])
    keep_all(kept)
    assert not files(tmp_path) and "not kept" in caplog.text and not kept.keep()


def test_damaged_and_foreign_files(tmp_path, caplog):
    kept = cache(tmp_path)
    ask(kept, TEXT[:100])
    keep_all(kept)
    (file,) = files(tmp_path)
    whole = file.read_bytes()
    DiskPrefixes(tmp_path, "another model", 1 << 30)
    assert files(tmp_path) == [file]  # left alone
    for damaged in (whole[:50], b"nonsense", b""):
        file.write_bytes(damaged)
        assert ask(cache(tmp_path), TEXT[:100]).cached_tokens == 0 and not files(tmp_path)
    # Its head is whole and its rows are not: found out when it is read.
    file.write_bytes(whole)
    found = cache(tmp_path)
    file.write_bytes(whole[:-100])
    assert ask(found, TEXT[:100]).cached_tokens == 0 and not files(tmp_path)


def test_no_space_on_disk_is_said_once(tmp_path, caplog, monkeypatch):
    kept = cache(tmp_path)
    ask(kept, TEXT[:100])

    def full(*_, **__):
        raise CheckpointError("no space left")

    monkeypatch.setattr(snapshot, "save", full)
    keep_all(kept)
    ask(kept, TEXT[100:200])
    keep_all(kept)
    assert caplog.text.count("no space left") == 1
    assert ask(kept, TEXT[:100]).cached_tokens > 90


WRITER = """
import sys, time
from pathlib import Path
from longdraft.kv import snapshot
from tests.serve import test_prefixes as t
kept = t.cache(Path(sys.argv[1]))
t.ask(kept, t.TEXT[:300])
save = snapshot.save_file
def slowly(tensors, path, metadata):
    save(tensors, path, metadata=metadata)
    if sys.argv[2] == "half":
        with open(path, "r+b") as file:
            file.truncate(5000)
    print("writing", flush=True)
    time.sleep(30)
if sys.argv[2] != "after":
    snapshot.save_file = slowly
kept.keep()
print("written", flush=True)
time.sleep(30)
"""


@pytest.mark.parametrize("when", ["half", "before the name", "after"])
def test_a_process_that_is_killed_leaves_no_damaged_file_in_use(tmp_path, when, monkeypatch):
    root = str(Path(__file__).parents[2])
    run = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path), when], stdout=subprocess.PIPE, text=True, cwd=root,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([root, *sys.path])},
    )  # fmt: skip
    assert run.stdout is not None and run.stdout.readline()
    run.send_signal(signal.SIGKILL)
    run.wait()
    monkeypatch.setattr("longdraft.serve.prefixes._WRITING_SECONDS", -1.0)
    kept = cache(tmp_path)
    assert not list(tmp_path.glob("*.part"))
    expected = SPEC.generate(Request(TEXT[:300], max_new_tokens=4, eos_token_ids=[]))[0].token_ids
    found = ask(kept, TEXT[:300])
    assert found.token_ids == expected and (found.cached_tokens > 0) == (when == "after")


@settings(max_examples=8)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(5, 120), st.booleans()), min_size=1, max_size=6))
def test_whatever_comes_and_whenever_it_restarts_tokens_are_the_same(tmp_path_factory, asked):
    folder = tmp_path_factory.mktemp("kept")
    kept = cache(folder, most=300 * SPEC.runner().kv_shape.bytes_per_token)
    for family, length, restarts in asked:
        prompt = [(family * 13 + x) % 61 for x in TEXT[:length]]
        expected = SPEC.generate(Request(prompt, max_new_tokens=4, eos_token_ids=[]))[0].token_ids
        assert ask(kept, prompt).token_ids == expected
        keep_all(kept)
        if restarts:
            kept = cache(folder, most=300 * SPEC.runner().kv_shape.bytes_per_token)


@given(st.lists(st.integers(0, 1), max_size=30), st.lists(st.integers(0, 1), max_size=30), st.integers(0, 3000))
def test_common_prefixes(a, b, length):
    shared = list(range(length))
    slow = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_prefix(shared + a, shared + b) == length + slow == common_prefix(tuple(shared + a), shared + b)
