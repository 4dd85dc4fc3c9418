"""Data sets by name: where their rows are, how a row becomes a prompt, and how its answer is scored.

Prompt templates are the authors' where they publish one (``templates.json``: LongBench, LongBench v2, RULER), otherwise
longdraft's own.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from longdraft.bench import data, examples, ruler
from longdraft.bench.conversations import turn_samples
from longdraft.bench.data import Sample
from longdraft.bench.examples import Example
from longdraft.bench.scores import metric_of_dataset
from longdraft.errors import CapabilityError, PromptError

# LongBench's repository holds one archive, which is read without the repository's loading script.
_LONGBENCH = "zip://data/{name}.jsonl::hf://datasets/THUDM/LongBench/data.zip"
# LongBench uses no chat template for these tasks.
_NO_CHAT_TEMPLATE = ("trec", "triviaqa", "samsum", "lcc", "repobench-p")
_TEMPLATES: dict[str, str] = json.loads(resources.files(__package__).joinpath("templates.json").read_text("utf-8"))
# SPEED-Bench has rows that begin with this notice in place of a text that it may not publish.
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
BUILT_IN = "stdlib"
"""The default data set: source files of Python's standard library."""
_BUILT_IN_MODULES = ("textwrap", "argparse", "typing")
_BUILT_IN_TASKS = {
    "stdlib-summary": "Summarise what this module offers.",
    "stdlib-quote": "Show the code of the first class in this module once more.",
}

Columns = Mapping[str, Any]


@dataclass(frozen=True)
class Task:
    """A data set.

    Attributes:
        template: the prompt template: ``{context}`` stands for the document, ``{name}`` for the column of that name.
        document_columns: columns that may hold the document; the first one present in a row is used.
        answer_columns: columns that may hold the reference answers; the first one present in a row is used.
        hub: arguments of ``datasets.load_dataset``; empty: the data set is read from files only.
        no_chat_template, truncate_middle: see :class:`~longdraft.bench.data.Sample`.
        map_columns: a row -> the template's columns. A column ``part`` is appended to the data set's name in reports.
        make_samples: a row -> its samples, in place of the template; used for conversations.
    """

    template: str
    document_columns: tuple[str, ...] = ("context",)
    answer_columns: tuple[str, ...] = ("answers", "answer")
    hub: Columns = field(default_factory=dict)
    no_chat_template: bool = False
    truncate_middle: bool = False
    map_columns: Callable[[Example], Columns] = lambda row: row.columns
    make_samples: Callable[[Example], Iterable[Sample]] | None = None


def _longbench(name: str) -> Task:
    hub = {"path": "json", "data_files": _LONGBENCH.format(name=name), "split": "train"}
    return Task(_TEMPLATES[name], hub=hub, no_chat_template=name in _NO_CHAT_TEMPLATE, truncate_middle=True)


def _spec_bench(example: Example) -> Columns:
    """The first turn of a Spec-Bench question. ``part`` is its category; MT-bench's categories are one part."""
    category = str(example.columns.get("category", ""))
    parts = ("translation", "summarization", "qa", "math_reasoning", "rag")
    return {"context": (example.columns.get("turns") or [""])[0], "part": category if category in parts else "mt_bench"}


def _speed_bench(example: Example) -> Columns:
    """The first turn of a SPEED-Bench question. ``part`` is ``category``, or ``split/category`` in throughput splits.

    Raises:
        PromptError: the row is a placeholder for a text that its authors may not publish.
    """
    messages = example.columns.get("messages") or [{}]
    (turn, *_) = example.columns.get("turns") or [messages[0].get("content") or ""]
    if str(turn).startswith(_PLACEHOLDER):
        raise PromptError(
            f"{example.origin} is a placeholder for a text that SPEED-Bench may not publish: fetch the texts with its "
            "prepare_data.py (docs/benchmarks.md), and give the file that it writes."
        )
    split = re.findall(r"throughput_\d+k", example.origin)
    return {"context": turn, "part": "/".join([*split[-1:], str(example.columns.get("category", ""))])}


TASKS = {
    **{name: _longbench(name) for name in _TEMPLATES if name.split("-")[0] not in ("longbench", "niah", "vt")},
    "longbench-v2": Task(
        _TEMPLATES["longbench-v2"], hub={"path": "THUDM/LongBench-v2", "split": "train"}, truncate_middle=True
    ),
    "ruler": Task("{context}", ("input",), ("outputs",)),
    "spec-bench": Task("{context}", map_columns=_spec_bench),
    "speed-bench": Task("{context}", map_columns=_speed_bench),
    "trajectories": Task("", make_samples=turn_samples),
    "pg19": Task(
        "{context}\n\nWrite on where this book stops.", ("text",), hub={"path": "emozilla/pg19", "split": "test"}
    ),
    "booksum": Task(
        "This is a chapter of a novel.\n\n{context}\n\nWrite a summary of this chapter.",
        ("chapter", "text"),
        ("summary_text", "summary"),
        {"path": "kmfoda/booksum", "split": "test"},
    ),
    "aime24": Task(
        "{context}\n\nThink step by step, and end with the answer, which is a whole number from 0 to 999.",
        ("problem", "Problem"),
        ("answer", "Answer"),
        {"path": "HuggingFaceH4/aime_2024", "split": "train"},
    ),
}
NAMES = (*TASKS, *ruler.KINDS, BUILT_IN)
"""Names of all data sets."""


def load_samples(names: Sequence[str], limit: int | None = None) -> list[Sample]:
    """The samples of the first ``limit`` rows of each data set.

    Args:
        names: ``FILE``: prompts (:func:`~longdraft.bench.data.read_samples`). ``task``: rows from the Hugging Face hub.
            ``task=PATH``: a file, folder or archive in the task's format. ``niah_single`` and RULER's other tasks: made
            here, in RULER's noise, or with ``=FILE`` in that text. ``stdlib``: :func:`built_in_samples`.

    Raises:
        PromptError: a file or a row cannot be used.
        CapabilityError: the ``datasets`` library is missing, or the hub cannot be reached.
    """
    return [sample for name in names for sample in _load(name, limit)]


def _load(name: str, limit: int | None) -> list[Sample]:
    if name == BUILT_IN:
        return built_in_samples()[:limit]
    task, equals, file = name.partition("=")
    path = Path(file).expanduser()
    if task in ruler.KINDS:
        template = _TEMPLATES["vt" if task == "vt" else "niah"]
        return ruler.make_samples(task, template, data.read_document(path) if equals else None, limit)
    if task in TASKS:
        if not equals and not TASKS[task].hub:
            raise CapabilityError(f"{task} is not fetched from the hub: give --data {task}=PATH (file or folder).")
        rows = examples.read_path(path, task, limit) if equals else examples.read_hub(task, TASKS[task].hub, limit)
        return [sample for row in rows for sample in _make_samples(task, row)]
    path = Path(name).expanduser()
    if not path.exists() and not path.suffix:
        raise PromptError(f"{name} is neither a file nor the name of a data set ({', '.join(NAMES)}).")
    return data.read_samples([path], limit)


def built_in_samples() -> list[Sample]:
    """Long source files of the standard library, each with two tasks: summarise and quote."""
    samples = []
    for name in _BUILT_IN_MODULES:
        text = module_source(name).read_text(encoding="utf-8")
        for dataset, instruction in _BUILT_IN_TASKS.items():
            samples.append(Sample(text, instruction, dataset, f"{name}.py"))
    return samples


def module_source(module: str) -> Path:
    """The source file of a module of the standard library.

    Raises:
        PromptError: this Python has no source files.
    """
    spec = importlib.util.find_spec(module)
    path = Path((spec and spec.origin) or "")
    if path.suffix != ".py" or not path.is_file():
        raise PromptError("This Python comes without the sources of its modules: give other data with --data.")
    return path


def _make_samples(name: str, example: Example) -> Iterable[Sample]:
    task = TASKS[name]
    if task.make_samples is not None:
        return task.make_samples(example)
    columns, template_parts = task.map_columns(example), task.template.split("{context}")
    column = next((c for c in task.document_columns if c in columns), None)
    placeholders = re.findall(r"\{(\w+)\}", "".join(template_parts))
    if column is None or not all(c in columns for c in placeholders):
        needed = " and ".join([" or ".join(task.document_columns), *placeholders])
        present = ", ".join(example.columns)
        raise PromptError(f"{example.origin} is no row of {name}: it lacks {needed}; it has {present}.")
    document, values = columns[column], {c: columns[c] or "" for c in placeholders}
    if not isinstance(document, str) or not document.strip() or not all(isinstance(x, str) for x in values.values()):
        raise PromptError(f"{example.origin}: its {' or '.join((column, *placeholders))} is empty or not a string.")
    before, after = (re.sub(r"\{(\w+)\}", lambda match: values[match[1]], x) for x in template_parts)
    answers = data.reference_answers(columns, *task.answer_columns)
    part = f"{name}/{columns['part']}" if "part" in columns else name
    return [
        Sample(
            document, after, part, example.origin, before, separator="", answers=answers,
            metric=metric_of_dataset(name) if answers else "", classes=tuple(columns.get("all_classes") or ()),
            no_chat_template=task.no_chat_template, truncate_middle=task.truncate_middle,
        )
    ]  # fmt: skip
