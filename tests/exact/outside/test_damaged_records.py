"""What runs leave on disk, damaged: it is said by name, or measured anew; and no answer is lost to a full disk."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

import longdraft
from longdraft import LongdraftError
from longdraft.cli.main import main
from longdraft.errors import MemoryBudgetError, NumericalError
from longdraft.planning.costs import CostTable, load_or_measure
from tests.support.tiny import tiny_folder, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return tiny_folder(path)


def test_a_damaged_kv_cache_is_replaced_and_anothers_file_is_not(folder, tmp_path, capfd):
    kept, (soft, hard) = tmp_path / "kept", resource.getrlimit(resource.RLIMIT_FSIZE)
    arguments = ["generate", "-m", folder, "-p", "hello " * 20, "-n", 4, "--method", "ar", "--json", "--kv-cache", kept]

    def run() -> int:
        return main([str(each) for each in arguments])

    def tokens() -> list[int]:
        return json.loads(capfd.readouterr().out.splitlines()[-1])["token_ids"]

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))  # a full disk at the end costs no answer
    try:
        assert run() == 1 and not kept.exists()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    out, err = capfd.readouterr()
    expected = json.loads(out.splitlines()[-1])["token_ids"]
    assert str(kept) in err.replace("\n", "") and len(expected) == 4
    assert run() == 0 and tokens() == expected
    written = bytearray(kept.read_bytes())
    written[-7] ^= 4
    kept.write_bytes(written)
    assert run() == 0 and kept.read_bytes() != written and tokens() == expected
    assert run() == 0 and tokens() == expected
    kept.write_text("a file of the user's")
    assert run() == 1 and kept.read_text() == "a file of the user's"


def test_lines_that_are_gone_swapped_or_doubled_are_noticed(folder, tmp_path, capfd):
    rows = [{"prompt": f"hello {i}", "max_tokens": 2} for i in range(5)]
    source, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n" + "\n\n".join(map(json.dumps, rows)) + "\n")
    arguments = ["batch", source, answers, "-m", folder, "--method", "ar", "--raw"]

    def run() -> int:
        return main([str(each) for each in arguments])

    assert run() == 0, capfd.readouterr().err
    whole = answers.read_bytes().splitlines(keepends=True)
    assert len(whole) == 5
    answers.write_bytes(b"".join(whole[:3]))
    assert run() == 0 and answers.read_bytes().splitlines(keepends=True)[:3] == whole[:3]
    damages = {
        2: whole[:1] + whole[2:], 1: [whole[1], whole[0], *whole[2:]], 4: [*whole[:3], whole[2], *whole[3:]],
        6: [*whole, whole[4]],
        3: [*whole[:2], b"[" * 100_000 + b"\n", *whole[3:]],
    }  # fmt: skip
    for line, damaged in damages.items():
        answers.write_bytes(b"".join(damaged))
        capfd.readouterr()
        assert run() == 1
        assert f"{answers}:{line} " in capfd.readouterr().err.replace("\n", "") + " "
        assert answers.read_bytes() == b"".join(damaged)


DAMAGES = [
    "", "[" * 100_000, "null", "[]", '{"key": 1}', ("table", "[]"), ("table", "{}"), ("seconds", "[[-1.0, 2.0]]"),
    ("seconds", '[["1", "2"]]'), ("seconds", "[[NaN, 1.0]]"), ("seconds", "[[1e400, 1.0]]"), ("seconds", "[[1.0]]"),
    ("seconds", "5"), ("rows", "[1, 1]"), ("rows", "[2, 1]"), ("rows", "[[1], 2]"), ("rows", '["1", 2]'),
    ("lengths", "[-5]"), ("lengths", "[]"), ("lengths", "[1e400]"),
]  # fmt: skip


def test_a_damaged_file_of_costs_is_measured_anew(tmp_path):
    table, measured = CostTable((64,), (1, 2), ((1.0, 1.5),)), list[str]()
    runner = longdraft.Speculator("ar", target=tiny_model()).runner()

    def found() -> CostTable | None:
        return load_or_measure(runner, tmp_path, measure_with=lambda *_, **__: measured.append("") or table)

    for times, damage in enumerate(DAMAGES, 1):
        assert found() == table == found() and len(measured) == times, damage
        (file,) = tmp_path.glob("*.json")
        if isinstance(damage, tuple):
            kept = json.loads(file.read_text())
            holder = kept if damage[0] == "table" else kept["table"]
            holder[damage[0]] = "HERE"
            damage = json.dumps(kept).replace('"HERE"', damage[1])
        file.write_text(damage)
    assert found() == table and len(measured) == len(DAMAGES) + 1


def test_numbers_that_are_none_name_the_model(tmp_path):
    model = tiny_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[:] = float("nan")
    model.save_pretrained(tmp_path)
    tiny_tokenizer(chat=True).save_pretrained(tmp_path)
    loaded = longdraft.load(tmp_path)
    for method in ("ar", "prompt-lookup"):
        spec = longdraft.Speculator(method, loaded.model, loaded.tokenizer)
        with pytest.raises(NumericalError, match=str(tmp_path)):
            spec.generate([1, 2, 3, 1, 2, 3], max_new_tokens=8)


def test_a_file_that_memory_has_no_room_for_is_not_called_damaged(tmp_path):
    tiny_folder(tmp_path, hidden=960, vocab=8000, layers=2)
    longdraft.load(tmp_path)
    limit = resource.getrlimit(resource.RLIMIT_AS)
    for room in (1 << 20, 8 << 20, 24 << 20, 48 << 20):
        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + room, limit[1]))
        try:
            longdraft.load(tmp_path)
        except LongdraftError as error:
            assert isinstance(error, MemoryBudgetError)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limit)
    assert longdraft.load(tmp_path).model is not None


PRESSED = """
import os, signal, sys
import longdraft.__main__ as entry

class Finder:
    def find_spec(self, name, *rest):
        if name == sys.argv[1]:
            sys.argv[1:] = ["generate", "-p", "x"] if name != "torch" else ["doctor"]
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
if sys.argv[1] == "torch":
    chosen, sys.argv[1:] = sys.argv[1], ["torch"]
    import longdraft.cli.main
    sys.argv[1:] = ["doctor"]
    sys.meta_path[0].find_spec = lambda name, *rest: os.kill(os.getpid(), signal.SIGINT) if name == chosen else None
entry.run()
"""


def _foreground() -> None:
    """A shell's background jobs, which the tests may be, ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("module", ["longdraft.cli.main", "torch"])
def test_ctrl_c_during_imports_shows_no_traceback(module):
    done = subprocess.run(
        [sys.executable, "-c", PRESSED, module], capture_output=True, text=True, timeout=120, preexec_fn=_foreground
    )
    assert done.returncode in (130, -signal.SIGINT) and "Traceback" not in done.stderr, done.stderr


def test_the_entry_point_restores_ctrl_c():
    code = (
        "import signal, longdraft.__main__ as m, sys; sys.argv = ['longdraft', '--version']\n"
        "try: m.run()\nexcept SystemExit: pass\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, preexec_fn=_foreground).returncode == 0
