"""Data sets by name: where their rows are, and how a row becomes a prompt. The words around documents are our own."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from longdraft.bench import data
from longdraft.bench.data import Sample
from longdraft.errors import CapabilityError, PromptError, reason_of
from longdraft.model.checkpoints import quiet

# LongBench's repository holds one archive; its rows are read from there, without the script that lies beside it.
_LONGBENCH = "zip://data/{name}.jsonl::hf://datasets/THUDM/LongBench/data.zip"
_READERS = {".parquet": "parquet", ".csv": "csv", ".json": "json"}
BUILT_IN = "stdlib"
"""The default data: source files of Python's standard library."""
_MODULES = ("textwrap", "argparse", "typing")
_BUILT_IN_TASKS = {
    "stdlib-summary": "Summarise what this module offers.",
    "stdlib-quote": "Show the code of the first class in this module once more.",
}


@dataclass(frozen=True)
class Task:
    """A data set.

    Attributes:
        hub: arguments of ``datasets.load_dataset``.
        document: columns for the long text; the first that a row has is used.
        instruction: the text behind the document; ``{input}`` is the row's question or text.
        preface: the text before the document.
    """

    hub: Mapping[str, Any]
    document: tuple[str, ...]
    instruction: str
    preface: str = ""


def _longbench(name: str, instruction: str, preface: str = "") -> Task:
    hub = {"path": "json", "data_files": _LONGBENCH.format(name=name), "split": "train"}
    return Task(hub, ("context",), instruction, preface)


TASKS = {
    "gov_report": _longbench(
        "gov_report", "Write a summary of this report, about one page long.", "This is a report by a government office."
    ),
    "qmsum": _longbench("qmsum", "{input}\nAnswer in a few sentences.", "This is the transcript of a meeting."),
    "multi_news": _longbench(
        "multi_news", "Write one summary of what all these articles report.", "These are news articles on one event."
    ),
    "lcc": _longbench("lcc", "Write the line of code that comes next."),
    "repobench-p": _longbench(
        "repobench-p",
        "With these files at hand, write the line that comes next in this one:\n\n{input}",
        "These are files of a code repository.",
    ),
    "hotpotqa": _longbench(
        "hotpotqa", "Question: {input}\nAnswer with a few words from the passages.", "Some passages to read first."
    ),
    "musique": _longbench(
        "musique", "Question: {input}\nAnswer with a few words from the passages.", "Some passages to read first."
    ),
    "pg19": Task({"path": "emozilla/pg19", "split": "test"}, ("text",), "Write on where this book stops."),
    "booksum": Task(
        {"path": "kmfoda/booksum", "split": "test"},
        ("chapter", "text"),
        "Write a summary of this chapter.",
        "This is a chapter of a novel.",
    ),
    "aime24": Task(
        {"path": "HuggingFaceH4/aime_2024", "split": "train"},
        ("problem", "Problem"),
        "Think step by step, and end with the answer, which is a whole number from 0 to 999.",
    ),
}


def read(names: Sequence[str], limit: int | None = None) -> list[Sample]:
    """The first ``limit`` samples of each data set.

    Args:
        names: a file of prompts, as :func:`longdraft.bench.data.read` takes it; the name of a task, whose rows come
            from the Hugging Face hub; ``task=file``, in the task's own format; or ``stdlib``.

    Raises:
        PromptError: a file or a row that cannot be used.
        CapabilityError: the ``datasets`` library is missing, or the hub cannot be reached.
    """
    return [sample for name in names for sample in _read(name, limit)]


def _read(name: str, limit: int | None) -> list[Sample]:
    if name == BUILT_IN:
        return built_in()[:limit]
    if name in TASKS:
        return [_sample(name, *row) for row in _hub_rows(name, limit)]
    task, equals, file = name.partition("=")
    if equals and task in TASKS:
        return [_sample(task, *row) for row in _file_rows(Path(file).expanduser(), limit)]
    path = Path(name).expanduser()
    if not path.exists() and not path.suffix:
        raise PromptError(
            f"{name} is neither a file nor a data set that is known by name ({', '.join((*TASKS, BUILT_IN))})."
        )
    return data.read([path], limit)


def built_in() -> list[Sample]:
    """Long source files of the standard library, each to be summarised and to be quoted.

    Raises:
        PromptError: this Python comes without sources.
    """
    found = []
    for name in _MODULES:
        file = importlib.import_module(name).__file__ or ""
        try:
            source = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise PromptError("This Python comes without the sources of its modules: name data with --data.") from None
        for dataset, instruction in _BUILT_IN_TASKS.items():
            found.append(Sample(source, instruction, dataset, f"{name}.py"))
    return found


def _sample(name: str, row: Mapping[str, Any], origin: str) -> Sample:
    task = TASKS[name]
    column = next((c for c in task.document if c in row), None)
    asked = row.get("input", "") or ""
    if column is None or ("{input}" in task.instruction and "input" not in row):
        needed = [" or ".join(task.document), *(["input"] if "{input}" in task.instruction else [])]
        raise PromptError(f"{origin} is no row of {name}: it lacks {' and '.join(needed)}; it has {', '.join(row)}.")
    document = row[column]
    if not isinstance(document, str) or not isinstance(asked, str) or not document.strip():
        raise PromptError(f"{origin}: its {column} is empty or not a string, or its input is none.")
    return Sample(document, task.instruction.replace("{input}", asked.strip()), name, origin, task.preface)


def _file_rows(path: Path, limit: int | None) -> list[tuple[dict[str, Any], str]]:
    """Rows of a local file, by its suffix."""
    if path.suffix not in _READERS:
        return data.rows(path, limit)
    if not path.is_file():
        raise PromptError(f"There is no file {path}: check the path.")
    load = _library()
    try:
        with quiet():
            stream = load(_READERS[path.suffix], data_files=str(path), split="train", streaming=True)
            found = [(dict(row), f"{path}:{i}") for i, row in enumerate(islice(stream, limit), 1)]
    except Exception as error:  # whatever a bad file sets off in one of several readers
        raise PromptError(f"{path} cannot be read as {path.suffix[1:]}: {reason_of(error)}.") from error
    if not found:
        raise PromptError(f"{path} has no rows.")
    return found


def _hub_rows(name: str, limit: int | None) -> list[tuple[dict[str, Any], str]]:
    """Rows of a task from the hub; only as much is downloaded as is read."""
    load = _library()
    try:
        with quiet():
            stream = load(**TASKS[name].hub, streaming=True)
            return [(dict(row), f"{name}:{i}") for i, row in enumerate(islice(stream, limit), 1)]
    except Exception as error:  # no network, no such data set, an archive that is laid out otherwise now
        raise CapabilityError(
            f"{name} cannot be read from the Hugging Face hub ({reason_of(error)}). Where the hub is out of reach, "
            f"fetch its file elsewhere and give it: --data {name}=FILE (.jsonl, .parquet, .csv)."
        ) from error


def _library() -> Any:
    try:
        from datasets import load_dataset
    except ImportError:
        raise CapabilityError(
            'Data sets by name and parquet files need the datasets library: pip install "longdraft[data]". JSONL files '
            "need nothing: --data FILE.jsonl, or --data gov_report=FILE.jsonl."
        ) from None
    return load_dataset
