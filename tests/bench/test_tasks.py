"""Data sets by name, their rows in local files, and what is asked for where nothing is named."""

from __future__ import annotations

import json
import sys
import zipfile

import pytest

from longdraft.bench import tasks
from longdraft.bench.data import Sample, fitted
from longdraft.errors import CapabilityError, PromptError
from tests.tiny import tiny_tokenizer

datasets = pytest.importorskip("datasets")
LONGBENCH = [
    {"input": f"why {i}?", "context": f"long text {i}", "answers": ["x"], "dataset": "any", "length": 9}
    for i in range(3)
]
ROWS = {
    "pg19": {"short_book_title": "t", "text": "It was a night"},
    "booksum": {"chapter": "Chapter 1", "summary_text": "s"},
    "aime24": {"problem": "Find x.", "solution": "", "answer": "1"},
}


@pytest.fixture
def write(tmp_path):
    def written(rows, suffix=".jsonl"):
        path = tmp_path / f"rows{suffix}"
        if suffix == ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            made = datasets.Dataset.from_list(rows)
            {".parquet": made.to_parquet, ".csv": made.to_csv}[suffix](path)
        return path

    return written


@pytest.mark.parametrize("name", tasks.TASKS)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".csv"])
def test_rows_of_every_task_from_a_file(write, name, suffix):
    rows = [ROWS[name]] if name in ROWS else LONGBENCH
    path = write(rows, suffix)
    found = tasks.read([f"{name}={path}"])
    assert len(found) == len(rows)
    assert [s.dataset for s in found] == [name] * len(rows)
    assert found[0].origin == f"{path}:1"
    assert found[0].document == next(rows[0][c] for c in tasks.TASKS[name].document if c in rows[0])
    assert found[0].instruction
    assert "{" not in found[0].instruction
    assert ("why 0?" in found[0].instruction) == (name in ("qmsum", "repobench-p", "hotpotqa", "musique"))


def test_the_limit_is_each_data_sets(write):
    path = write(LONGBENCH)
    found = tasks.read([f"qmsum={path}", f"lcc={path}"], limit=2)
    assert [(s.dataset, s.document) for s in found] == [
        ("qmsum", "long text 0"), ("qmsum", "long text 1"), ("lcc", "long text 0"), ("lcc", "long text 1"),
    ]  # fmt: skip
    assert [len(tasks.read([f"lcc={write(LONGBENCH, '.parquet')}"], n)) for n in (1, 3, 9, None)] == [1, 3, 3, 3]


@pytest.mark.parametrize("raw", [False, True])
def test_what_stands_before_and_behind_a_document_is_not_cut(raw):
    tokenizer = tiny_tokenizer(chat=True)
    sample = Sample("one two three " * 30, "why?", "x", "x:1", preface="read this.")
    ids = fitted(sample, tokenizer, 100, raw)
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert len(ids) == 100
    assert text.startswith("read this.\n\none two")
    assert text.endswith("why?")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, r"rows.jsonl:1 is no row of qmsum: it lacks context and input; it has text"),
        ({"context": "x"}, "it lacks context and input"),
        ({"context": " ", "input": "x"}, "context is empty"),
        ({"context": "x", "input": 3}, "not a string"),
    ],
)
def test_rows_of_another_format_are_named(write, row, message):
    with pytest.raises(PromptError, match=message):
        tasks.read([f"qmsum={write([row])}"])


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(PromptError):
        tasks.read([f"lcc={tmp_path / 'none.parquet'}"])
    (tmp_path / "bad.parquet").write_bytes(b"nothing of the kind")
    with pytest.raises(PromptError):
        tasks.read([f"lcc={tmp_path / 'bad.parquet'}"])
    with pytest.raises(PromptError):
        tasks.read(["none.jsonl"])
    with pytest.raises(PromptError):
        tasks.read(["govreport"])


@pytest.mark.parametrize("name", ["gov_report", "pg19"])
def test_no_hub(name):
    """Tests run offline: both ways of reaching the hub end in the same advice."""
    with pytest.raises(CapabilityError, match=f"--data {name}=FILE"):
        tasks.read([name])


def test_rows_from_the_hub(monkeypatch):
    asked = []

    def load_dataset(**arguments):
        asked.append(arguments)
        return iter(LONGBENCH)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (found,) = tasks.read(["qmsum"], limit=1)
    assert (found.document, found.origin, found.dataset) == ("long text 0", "qmsum:1", "qmsum")
    assert asked[0]["streaming"] is True
    assert asked[0]["data_files"].startswith("zip://data/qmsum.jsonl::hf://datasets/")


def test_an_archive_is_read_as_the_hub_is(tmp_path, write):
    """The very arguments that LongBench is read with, its archive being a local one."""
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.write(write(LONGBENCH), "data/qmsum.jsonl")
        archive.writestr("data/other.jsonl", "{}")
    hub = dict(tasks.TASKS["qmsum"].hub)
    hub["data_files"] = hub["data_files"].split("::")[0] + f"::{tmp_path / 'data.zip'}"
    stream = datasets.load_dataset(**hub, streaming=True)
    assert [row["context"] for row in stream] == ["long text 0", "long text 1", "long text 2"]


def test_without_the_library(write, monkeypatch):
    parquet = write(LONGBENCH, ".parquet")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert len(tasks.read([f"lcc={write(LONGBENCH)}"])) == 3
    for name in ("gov_report", f"lcc={parquet}"):
        with pytest.raises(CapabilityError, match=r"longdraft\[data\]"):
            tasks.read([name])


def test_the_standard_library_is_always_there(monkeypatch):
    found = tasks.read([tasks.BUILT_IN])
    assert {s.dataset for s in found} == {"stdlib-summary", "stdlib-quote"}
    assert all(len(s.document) > 10_000 for s in found)
    assert len(tasks.read([tasks.BUILT_IN], limit=2)) == 2
    monkeypatch.setattr(tasks.Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(OSError()))
    with pytest.raises(PromptError, match="--data"):
        tasks.built_in()
