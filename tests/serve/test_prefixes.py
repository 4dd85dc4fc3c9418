"""Prompts on disk: there after a restart, bounded, and never damaged."""

from __future__ import annotations

import logging
import os
import resource
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from longdraft import LoadedModel
from longdraft.errors import CheckpointError
from longdraft.memory import snapshot
from longdraft.memory.store import KVShape, KVStore
from longdraft.serve.prefixes import DiskPrefixes
from longdraft.serve.service import service_of
from longdraft.serve.settings import Settings
from tests.serve.kept_texts import HEAD, NEW, OLD, POINTS, ROW, Texts, files, kill_at_every_point
from tests.support import elsewhere
from tests.support.tiny import tiny_model, tiny_tokenizer

TEXT = list(range(100))


def kept(folder: Path, *texts: list[int], **options) -> Path:
    """Writes a file for each text, in this order; the path of one of them."""
    cache = Texts(folder, **options)
    for text in texts:
        cache.read(text)
        assert cache.keep_all() == 1
    return files(folder)[0]


def sizes(folder: Path) -> list[int]:
    """Tokens of each file, ascending."""
    return sorted(map(length, files(folder)))


def length(file: Path) -> int:
    return len(snapshot.known(file).tokens)


def family(i: int) -> list[int]:
    """A text of 60 tokens."""
    return [i, *TEXT[:59]]


def room_for(texts: int) -> int:
    """Bytes that hold so many texts of 60 tokens."""
    return texts * (60 * ROW + HEAD)


# --- reading ---


@pytest.mark.parametrize(
    ("prompt", "piece", "rows", "reused"),
    [
        ([*TEXT[:60], 7, 7], 1, 200, 60),
        ([7, *TEXT], 1, 200, 0),
        (TEXT, 1, 200, 99),  # the last token is read again
        ([*TEXT[:60], 7], 25, 200, 50),  # only whole pieces are reused
        ([*TEXT[:15], 7], 1, 20, 15),  # a long text's file serves slots with few rows
    ],
)
def test_a_prompt_survives_a_restart(tmp_path, prompt, piece, rows, reused):
    kept(tmp_path, TEXT)
    assert Texts(tmp_path, rows=rows).read(prompt, piece=piece) == reused


def test_a_file_is_not_read_for_what_slots_have_too(tmp_path):
    cache = Texts(tmp_path)
    cache.read(TEXT)
    cache.keep_all()
    (kept_as,) = files(tmp_path)
    file = kept_as.rename(tmp_path / "elsewhere")
    assert cache.read([*TEXT[:60], 7], slot=1) == 60  # from slot 0
    assert cache.read([*TEXT[:63], 7], slot=0) == 63
    assert cache.read([*TEXT[:66], 7], slot=0) == 63  # three tokens are not worth reading a file
    file.rename(kept_as)
    assert cache.read([*TEXT[:80], 7], slot=0) == 80


def test_the_file_that_has_most_of_a_prompt_is_read(tmp_path):
    kept(tmp_path, TEXT[:20], [*TEXT[:50], *[8] * 20], [*TEXT[:30], *[9] * 20])
    assert Texts(tmp_path).read([*TEXT, 7]) == 50


# --- writing ---


def test_one_text_is_written_at_a_time_the_longest_first(tmp_path):
    cache = Texts(tmp_path, slots=3)
    for slot, n in enumerate((20, 40, 30)):
        cache.read([slot, *range(n)], slot)
    written = []
    while cache.keep():
        written.append(sizes(tmp_path))
    assert written == [[41], [31, 41], [21, 31, 41]] and not cache.keep()


def test_a_text_that_is_on_disk_or_short_is_not_written(tmp_path):
    cache = Texts(tmp_path, slots=4)
    for slot, text in enumerate((TEXT, TEXT[:30], [*TEXT[:50], 7, 7, 7], [1, 2, 3])):
        cache.read(text, slot)
    assert cache.keep_all() == 1
    assert Texts(tmp_path).keep_all() == 0  # nor is one of which nothing was decoded


def test_a_text_that_grows_is_one_file_and_is_written_when_a_quarter_is_new(tmp_path):
    cache, written = Texts(tmp_path), []
    for length in range(20, 180, 4):
        cache.read(list(range(length)))
        written += [length] if cache.keep() else []
        assert sizes(tmp_path) == written[-1:]
    assert written == [20, 28, 40, 56, 76, 104, 140] and Texts(tmp_path).read(list(range(170))) == 140


def test_questions_about_a_document_keep_it_and_what_they_add(tmp_path):
    document = TEXT[:60]
    short, long = [*document, 7, *range(9)], [*document, 8, *range(30)]
    cache = Texts(tmp_path)
    for text in (document, short, long, [*document, 9, *range(31)]):
        cache.read(text)
        cache.keep()
    assert sizes(tmp_path) == [91, 92]  # the document is in both; a sixth more is not worth a file
    assert [Texts(tmp_path).read(text) for text in (document, short, long)] == [59, 60, 90]


def test_a_text_that_is_being_decoded_is_left_alone(tmp_path):
    cache = Texts(tmp_path)
    cache.read(TEXT)
    cache.store.commit(0, range(3))
    assert not cache.keep()


# --- limits ---


def test_the_least_recently_used_text_is_deleted(tmp_path):
    kept(tmp_path, *map(family, range(3)), most=room_for(3))
    Texts(tmp_path).read(family(0))  # in another run, which makes the second one the oldest
    kept(tmp_path, family(3), most=room_for(3))
    assert [Texts(tmp_path).read(family(i)) for i in range(4)] == [59, 0, 59, 59]


def test_a_text_that_is_used_in_its_slot_counts_as_used_on_disk(tmp_path):
    cache = Texts(tmp_path, room_for(2))
    for i in (0, 1):
        cache.read(family(i), slot=i)
        cache.keep()
    cache.read(family(0), slot=0)
    cache.read(family(2), slot=1)
    cache.keep()
    assert [Texts(tmp_path).read(family(i)) for i in range(3)] == [59, 0, 59]


@settings(max_examples=40)
@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(0, 3), st.integers(4, 90), st.integers(0, 2), st.booleans()), max_size=12),
)
def test_slots_hold_their_prompts_and_files_stay_in_their_limit_whatever_comes(tmp_path_factory, most, asked):
    folder, most = tmp_path_factory.mktemp("kept"), most * 1000 + HEAD
    save = snapshot.save

    def used():
        return sum(file.stat().st_size for file in files(folder))

    def bounded(store, slot, tokens, target, path, kind):
        """There is room before anything is written."""
        assert used() + len(tokens) * ROW <= most
        save(store, slot, tokens, target, path, kind)

    cache = Texts(folder, most, slots=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "save", bounded)
        for family, length, slot, restarts in asked:
            cache.read([min(x, 30 * family) for x in TEXT[:length]], slot)  # compares what the slot holds
            cache.keep()
            assert used() <= most
            if restarts:
                cache = Texts(folder, most, slots=3)


def test_a_text_that_is_larger_than_the_limit_is_not_kept_and_shorter_ones_are(tmp_path, caplog):
    cache = Texts(tmp_path, 40 * ROW + HEAD)
    cache.read(TEXT, 0)
    cache.read([7, *TEXT[:30]], 1)
    assert cache.keep_all() == 1 and not cache.keep()
    assert sizes(tmp_path) == [31] and len(caplog.records) == 1


# --- full disks, damaged files ---


def test_a_full_disk_is_reported_once_and_nothing_is_lost(tmp_path, caplog, free_disk):
    cache = Texts(tmp_path, room_for(2), pause=0.0)
    for text in (TEXT[:20], family(7)):
        cache.read(text)
        cache.keep()
    before = files(tmp_path)
    free_disk(0)
    for text in (TEXT, [8, *TEXT]):
        cache.read(text)
        assert not cache.keep()
        assert files(tmp_path) == before and cache.read([*text, 1]) == len(text)
    free_disk(None)
    assert len(caplog.records) == 1
    assert cache.keep()  # there is room again


def test_writing_that_fails_leaves_nothing_behind_but_what_was_there(tmp_path, caplog):
    """It fails by the system's limit for files; after that nothing is tried for a while."""
    kept(tmp_path, TEXT[:20])
    before = files(tmp_path)
    cache = Texts(tmp_path)
    cache.read(TEXT)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        assert not cache.keep()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(caplog.records) == 1
    assert [*tmp_path.iterdir()] == before and not cache.keep()
    assert Texts(tmp_path).read(TEXT) == 20


@pytest.mark.parametrize("end", [0, 5, 50, 1000, -1])
def test_damaged_files_are_deleted_with_a_warning(tmp_path, caplog, end):
    file = kept(tmp_path, TEXT)
    file.write_bytes(file.read_bytes()[:end])
    assert Texts(tmp_path).read(TEXT) == 0
    assert not files(tmp_path) and "damaged" in caplog.text


def test_files_that_are_not_snapshots_are_damaged_or_somebody_elses(tmp_path):
    kept(tmp_path, TEXT).write_bytes(b"nonsense" * 100)
    other = tmp_path / "other.kv.safetensors"
    save_file({}, other, metadata={"format": "other"})
    assert Texts(tmp_path).read(TEXT) == 0
    assert files(tmp_path) == [other]


CHANGES: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "flipped": lambda path: path.write_bytes(path.read_bytes()[:-5] + b"\7" + path.read_bytes()[-4:]),
    "another text's": lambda path: path.write_bytes(kept(path.parent / "other", [7] * 100).read_bytes()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_is_damaged_or_gone_after_the_start_is_not_used(tmp_path, caplog, change):
    file = kept(tmp_path, TEXT)
    cache = Texts(tmp_path)
    cache.read([*TEXT[:10], 9])
    CHANGES[change](file)
    assert cache.read([*TEXT, 7]) == 0  # the ten of the slot are lost: they could have been overwritten
    assert change == "another text's" or (not files(tmp_path) and "snapshot" in caplog.text)


def test_a_file_that_may_not_be_read_is_left_alone(tmp_path, caplog, monkeypatch):
    file = kept(tmp_path, TEXT)

    def forbidden(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(snapshot, "head", forbidden)
    assert Texts(tmp_path).read(TEXT) == 0
    assert files(tmp_path) == [file] and "Permission denied" in caplog.text


def test_targets_share_a_folder_and_its_limit_and_no_files(tmp_path):
    def reused():
        return [Texts(tmp_path, target=target).read(TEXT[:60]) for target in ("one", "two")]

    for target in ("one", "two"):
        kept(tmp_path, TEXT[:60], most=room_for(2), target=target)
    assert len(files(tmp_path)) == 2 and reused() == [59, 59]
    kept(tmp_path, family(7), most=room_for(2), target="two")
    assert reused() == [0, 59]


def test_a_file_is_read_only_if_it_has_the_hidden_states_that_are_needed(tmp_path):
    kept(tmp_path, TEXT)
    cache = Texts(tmp_path, layers=(1, 2))
    assert cache.read(TEXT) == 0
    assert cache.keep_all() == 1  # with the hidden states
    for layers, reused in (((1, 2), 99), ((), 99), ((0, 2), 0)):
        assert Texts(tmp_path, layers=layers).read(TEXT) == reused


def test_a_server_whose_folder_cannot_be_written_does_not_start(tmp_path):
    model = LoadedModel(tiny_model(context=64), tiny_tokenizer(chat=True))
    settings = Settings("m", ("ar",), slots=1, context=64, tree_bytes=0, snapshots=tmp_path / "kept")
    assert service_of(model, settings, {}, {}).settings.context == 64 and (tmp_path / "kept").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError):
        service_of(model, replace(settings, snapshots=tmp_path / "file" / "kept"), {}, {})


@pytest.mark.parametrize(
    "changed",
    [{"feature_layers": "one"}, {"target": ""}, {"format": "longdraft-kv-9"}, {"checksums": "[" * 100_000},
     {"checksums": "5"}, {"kind": "another"}, {"checksum": "9" * 5000}],
    ids=lambda each: "-".join(each),
)  # fmt: skip
def test_wrong_metadata_are_a_miss(changed, tmp_path):
    path = kept(tmp_path, TEXT)
    with safe_open(path, framework="pt") as file:
        save_file(load_file(path), path, metadata=file.metadata() | changed)
    assert Texts(tmp_path).read(TEXT) == 0


def test_a_file_that_memory_has_no_room_for_is_a_miss_and_stays(tmp_path, caplog):
    shape, path = KVShape(2, 1, 8192, torch.float32), tmp_path / "a.kv.safetensors"

    def opened() -> DiskPrefixes:
        cache = DiskPrefixes(tmp_path, "target", 1 << 30, 4)
        cache.open(lambda slots, rows: KVStore(shape, 1, 200), 1, 200)
        return cache

    whole = KVStore(shape, 1, 200)
    whole.lengths[0] = 100
    snapshot.save(whole, 0, TEXT, "target", path)
    cache = opened()
    _, hard = limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (4 << 20), hard))
    try:
        found, _ = cache.begin(0, TEXT), DiskPrefixes(tmp_path, "target", 1 << 30, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert found == 0 and path.is_file() and path.name in caplog.text
    assert cache.begin(0, TEXT) == opened().begin(0, TEXT) == 99


def test_a_folder_that_cannot_be_written_ends_the_start(tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        DiskPrefixes(tmp_path, "target", 1 << 30)


# --- kill -9 ---


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.slow
def test_a_process_that_is_killed_leaves_no_damaged_file_in_use(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    said = tmp_path / "said"
    assert elsewhere.ended(elsewhere.start(said, kill_at_every_point, tmp_path), 120) == 0, said.read_text()
    for point in POINTS:
        cache = Texts(tmp_path / point)
        assert not list((tmp_path / point).glob("*.part")), point
        assert cache.read(OLD) == 39, point
        assert cache.read(NEW) == (119 if point == "with its name" else 60), point
    assert not caplog.text  # no file was damaged: renaming is the last thing
