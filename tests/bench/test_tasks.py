"""Data sets by name, their rows in local files, and the default data."""

from __future__ import annotations

import json
import sys
import zipfile

import pytest

from longdraft.bench import ruler, scores, tasks
from longdraft.bench.data import Sample, encode_truncated
from longdraft.errors import CapabilityError, PromptError
from tests.support.tiny import tiny_tokenizer

datasets = pytest.importorskip("datasets")
LONGBENCH = [
    {"input": f"why {i}?", "context": f"long text {i}", "answers": ["x"], "dataset": "any", "length": 9}
    for i in range(3)
]
CHOICES = {"question": "why 0?", "choice_A": "a", "choice_B": "b", "choice_C": "c", "choice_D": "{context}"}
# A row of each layout, and the text before and behind its document.
LAYOUTS = {
    "qmsum": (LONGBENCH[0], "You are given a meeting", "why 0?\nAnswer:"),
    "gov_report": (LONGBENCH[0], "You are given a report", "Summary:"),
    "lcc": (LONGBENCH[0], "Please complete the code given below. \n", "Next line of code:\n"),
    "repobench-p": (LONGBENCH[0], "Please complete", "why 0?Next line of code:\n"),
    "longbench-v2": ({**CHOICES, "context": "long text 0", "answer": "B"}, "Please read", "(D) {context}\n\nFormat"),
    "pg19": ({"short_book_title": "t", "text": "It was a night"}, "", "Write on"),
    "booksum": ({"chapter": "Chapter 1", "summary_text": "s"}, "This is a chapter", "Write a summary"),
    "aime24": ({"problem": "Find x.", "solution": "", "answer": "1"}, "", "Think step by step"),
    "ruler": ({"index": 0, "input": "A needle", "outputs": ["7"]}, "", ""),
    "spec-bench": ({"question_id": 1, "category": "rag", "turns": ["first", "second"]}, "", ""),
}  # fmt: skip


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


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_row_of_every_layout(write, name):
    row, before, behind = LAYOUTS[name]
    path = write([row], ".parquet")
    (first,) = tasks.load_samples([f"{name}={path}"])
    assert first.dataset.startswith(name) and first.origin == f"{path}:1"
    texts = [row[c] for c in tasks.TASKS[name].document_columns if c in row] or [row.get("input") or row["turns"][0]]
    assert first.document == texts[0]
    assert first.preface.startswith(before) and behind in first.instruction
    assert bool(first.metric) == bool(first.answers)


def test_every_task_of_longbench_has_a_template_and_a_score(write):
    path = write([LONGBENCH[0] | {"all_classes": ["x", "y"]}])
    for name in [name for name, task in tasks.TASKS.items() if "data.zip" in str(task.hub)]:
        (sample,) = tasks.load_samples([f"{name}={path}"])
        assert "{" not in sample.preface + sample.instruction and sample.metric and sample.truncate_middle


def test_parts_of_a_data_set(write):
    questions = [{"category": c, "turns": ["q"]} for c in ("writing", "translation")]
    found = tasks.load_samples([f"spec-bench={write(questions)}"])
    assert [s.dataset for s in found] == ["spec-bench/mt_bench", "spec-bench/translation"]


def test_folders_and_archives(tmp_path, write):
    rows = "".join(json.dumps(row) + "\n" for row in LONGBENCH)
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/lcc.jsonl", rows)
        archive.writestr("data/other.jsonl", "{}")
    (tmp_path / "unpacked").mkdir()
    (tmp_path / "unpacked" / "lcc.jsonl").write_text(rows)
    for place in ("data.zip", "unpacked"):
        assert [s.document for s in tasks.load_samples([f"lcc={tmp_path / place}"], 2)] == [
            "long text 0",
            "long text 1",
        ]
    (tmp_path / "v2.json").write_text(json.dumps([LAYOUTS["longbench-v2"][0]]))
    assert tasks.load_samples([f"longbench-v2={tmp_path / 'v2.json'}"])[0].answers == ("B",)
    (tmp_path / "books").mkdir()
    for name in ("10", "11"):
        (tmp_path / "books" / f"{name}.txt").write_text(f"book {name}")
    assert [s.document for s in tasks.load_samples([f"pg19={tmp_path / 'books'}"])] == ["book 10", "book 11"]
    assert len(tasks.load_samples([f"pg19={tmp_path / 'books'}"], 1)) == 1
    for bad in ("v3.json", "v3.jsonl"):
        (tmp_path / bad).write_text("{")
        with pytest.raises(PromptError, match=bad):
            tasks.load_samples([f"longbench-v2={tmp_path / bad}"])


@pytest.mark.parametrize("kind", ruler.TASKS)
def test_needles_stay_when_a_prompt_is_cut(tmp_path, kind):
    tokenizer = tiny_tokenizer(chat=True)
    (tmp_path / "essay.txt").write_text("it was a day in may. " * 500)
    samples = [tasks.load_samples([name], 1)[0] for name in (kind, kind, f"{kind}={tmp_path / 'essay.txt'}")]
    for sample in samples[1:]:
        text = tokenizer.decode(encode_truncated(sample, tokenizer, 1500), skip_special_tokens=True)
        places = [text.index(sentence.lower()) for _, sentence in sample.needles]
        assert len(text) > 1400 and places == sorted(places)
        assert scores.score_answer(sample, " ".join(sample.answers)) == 1.0
        assert scores.score_answer(sample, sample.answers[0]) == 1 / len(sample.answers)
    assert samples[0] == samples[1]


def test_a_middle_is_cut_out_as_longbench_does():
    tokenizer = tiny_tokenizer(chat=True)
    sample = Sample(
        "".join(f"{i} " for i in range(200)), "end", "x", "x:1", "begin ", separator="", truncate_middle=True
    )
    text = tokenizer.decode(encode_truncated(sample, tokenizer, 60), skip_special_tokens=True)
    assert text.startswith("begin 0 1 2 ") and text.endswith("198 199 end")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, r"rows.jsonl:1 is no row of qmsum: it lacks context and input; it has text"),
        ({"context": "x"}, "it lacks context and input"),
        ({"context": " ", "input": "x"}, "is empty"),
        ({"context": "x", "input": 3}, "not a string"),
    ],
)
def test_rows_of_another_format_are_named(write, row, message):
    with pytest.raises(PromptError, match=message):
        tasks.load_samples([f"qmsum={write([row])}"])


def test_files_that_cannot_be_read(tmp_path):
    for name, content in (("bad.parquet", b"nothing of the kind"), ("binary", b"\xff\xfe\xfd"), ("empty", b"")):
        (tmp_path / name).write_bytes(content)
    for name in (
        f"lcc={tmp_path / 'none.parquet'}", f"lcc={tmp_path / 'bad.parquet'}", "none.jsonl", "govreport",
        *(str(tmp_path / name) for name in ("", "binary", "empty")),
    ):  # fmt: skip
        with pytest.raises(PromptError):
            tasks.load_samples([name])


def test_no_hub():
    """Tests run offline."""
    with pytest.raises(CapabilityError, match="--data gov_report=FILE"):
        tasks.load_samples(["gov_report"])


def test_rows_from_the_hub(monkeypatch):
    asked = []

    def load_dataset(**arguments):
        asked.append(arguments)
        return iter(LONGBENCH)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (found,) = tasks.load_samples(["qmsum"], limit=1)
    assert (found.document, found.origin, found.dataset) == ("long text 0", "qmsum:1", "qmsum")
    assert asked[0]["streaming"] is True
    assert asked[0]["data_files"].startswith("zip://data/qmsum.jsonl::hf://datasets/")


def test_without_the_library(write, monkeypatch):
    parquet = write(LONGBENCH, ".parquet")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert len(tasks.load_samples([f"lcc={write(LONGBENCH)}"])) == 3
    for name in ("gov_report", f"lcc={parquet}"):
        with pytest.raises(CapabilityError, match=r"longdraft\[data\]"):
            tasks.load_samples([name])


def test_the_standard_library_is_always_there(monkeypatch):
    found = tasks.load_samples([tasks.BUILT_IN])
    assert {s.dataset for s in found} == {"stdlib-summary", "stdlib-quote"}
    assert all(len(s.document) > 10_000 for s in found)
    assert len(tasks.load_samples([tasks.BUILT_IN], limit=2)) == 2
    monkeypatch.setattr(tasks.Path, "is_file", lambda path: False)
    with pytest.raises(PromptError, match="--data"):
        tasks.built_in_samples()
