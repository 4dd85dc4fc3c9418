"""benchmarks/pieces.py: files come through small transfers whole, or it is said what is missing or damaged."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path

import pytest

MIB = 2**20


@pytest.fixture
def pieces(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    return importlib.import_module("pieces")


@pytest.fixture
def model(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(random.Random(0).randbytes(2 * MIB + 1000))
    return file


@pytest.fixture
def here(pieces, model, tmp_path):
    """The folder of a file's pieces of 1 MiB."""
    assert pieces.main(["split", str(model), "--out", str(tmp_path / "pieces"), "--size", "1"]) == 0
    return tmp_path / "pieces"


def joined(pieces, here, tmp_path):
    return pieces.main(["join", str(here), "--out", str(tmp_path / "there")])


def test_all_in_one_transfer(pieces, here, model, tmp_path):
    assert sorted(path.name for path in here.iterdir()) == [
        *(f"model.gguf.{i:03d}" for i in range(3)), "model.gguf.pieces.json",
    ]  # fmt: skip
    assert all(path.stat().st_size <= MIB for path in here.iterdir())
    assert joined(pieces, here, tmp_path) == 0
    assert (tmp_path / "there" / "model.gguf").read_bytes() == model.read_bytes()
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["model.gguf"]
    assert joined(pieces, here, tmp_path) == 0  # it is there


def test_piece_by_piece_in_any_order(pieces, here, model, tmp_path, capsys):
    parts = {path.name: path.read_bytes() for path in here.glob("*.0*")}
    for path in here.glob("*.0*"):
        path.unlink()
    for count, name in enumerate(("model.gguf.002", "model.gguf.000", "model.gguf.001"), 1):
        (here / name).write_bytes(parts[name])
        assert joined(pieces, here, tmp_path) == (0 if count == 3 else 3)
        (here / name).unlink()  # a transfer replaces what the one before brought
        said = capsys.readouterr().out
        assert count == 3 or f"{3 - count} pieces missing" in said
    assert (tmp_path / "there" / "model.gguf").read_bytes() == model.read_bytes()


def test_a_split_goes_on(pieces, here, model, tmp_path):
    whole = {path.name: path.read_bytes() for path in here.iterdir()}
    kept = (here / "model.gguf.000").stat().st_mtime_ns
    (here / "model.gguf.001").write_bytes(b"cut off")
    (here / "model.gguf.pieces.json").unlink()
    pieces.main(["split", str(model), "--out", str(here), "--size", "1"])
    assert {path.name: path.read_bytes() for path in here.iterdir()} == whole
    assert (here / "model.gguf.000").stat().st_mtime_ns == kept


def test_damage_is_named(pieces, here, model, tmp_path, capsys):
    piece = here / "model.gguf.001"
    right = piece.read_bytes()
    piece.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
    assert joined(pieces, here, tmp_path) == 1 and "model.gguf.001" in capsys.readouterr().err
    piece.write_bytes(right)
    assert joined(pieces, here, tmp_path) == 0
    (tmp_path / "there" / "model.gguf").write_bytes(b"another")
    assert joined(pieces, here, tmp_path) == 1 and "another file" in capsys.readouterr().err
    manifest = here / "model.gguf.pieces.json"
    found = json.loads(manifest.read_text())
    for broken in ("{", json.dumps(found | {"name": "../model"}), json.dumps(found | {"pieces": found["pieces"][1:]})):
        manifest.write_text(broken)
        assert joined(pieces, here, tmp_path) == 1 and "pieces.json" in capsys.readouterr().err
    manifest.unlink()
    assert joined(pieces, here, tmp_path) == 1 and "no list of pieces" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--size", "61"), ("--size", "0")])
def test_what_cannot_be_split(pieces, model, tmp_path, capsys, words):
    assert pieces.main(["split", str(model), "--out", str(tmp_path / "out"), *words]) == 1
    assert "60 MiB" in capsys.readouterr().err
    assert pieces.main(["split", str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 1
