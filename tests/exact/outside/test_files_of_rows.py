"""Results, answers of a batch and training text: files of JSON lines that a run that was killed goes on with."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("fastapi")

from longdraft.batch.output import OutputFile
from longdraft.bench.records import RecordFile
from longdraft.errors import CheckpointError
from longdraft.training.answers import AnswerFile

resource = pytest.importorskip("resource")


class Batch:
    """Each class has one way to open a file, and one to add a row to it."""

    def __init__(self, path):
        with OutputFile(path, {"input": "a"}) as self.file:
            self.rows = self.file.num_rows

    def add(self, number):
        self.file.write({"id": number, "text": "ä"}, False)


class Results:
    def __init__(self, path):
        self.file = RecordFile(path, {"format": "a", "version": 1}, dict)
        self.rows = len(self.file.records)

    def add(self, number):
        self.file.append({"id": number, "text": "ä"})


class Answers:
    def __init__(self, path):
        self.file = AnswerFile(path)
        self.rows = self.file.num_answers

    def add(self, number):
        self.file.append({"id": number, "text": "ä", "at": [number, 0, 1], "usage": [1, 2]})


each_kind = pytest.mark.parametrize("kind", [Batch, Results, Answers])


def ids(path):
    return [row["id"] for row in map(json.loads, path.read_text().splitlines()) if "id" in row]


@each_kind
def test_a_torn_line_is_written_over(kind, tmp_path):
    path = tmp_path / "rows"
    first = kind(path)
    first.add(0)
    first.add(1)
    whole = path.read_text()
    with path.open("ab") as torn:
        torn.write(b'{"id": 7, "te')
    again = kind(path)
    assert again.rows == 2
    again.add(2)
    assert ids(path) == [0, 1, 2] and path.read_text().startswith(whole)


@each_kind
def test_a_damaged_line_is_named_and_nothing_is_cut(kind, tmp_path):
    path = tmp_path / "rows"
    kind(path).add(0)
    before = path.read_text()
    for damage in ('{"id": ', "[1]", "\0", '"text"'):
        path.write_text(before + damage + "\n" + before.splitlines()[-1] + "\n")
        damaged = path.read_bytes()
        with pytest.raises(CheckpointError, match=f"{path}:{len(before.splitlines()) + 1} "):
            kind(path)
        assert path.read_bytes() == damaged


@each_kind
def test_a_full_disk_leaves_whole_lines(kind, tmp_path):
    """It is full by the system's limit for files."""
    path = tmp_path / "rows"
    file = kind(path)
    file.add(0)
    before, (soft, hard) = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 4, hard))
    try:
        with pytest.raises(CheckpointError):
            file.add(1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    file.add(1)
    assert ids(path) == [0, 1] and kind(path).rows == 2
