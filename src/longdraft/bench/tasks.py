"""Makes samples of data sets by name: knows where the rows are, how a row becomes a prompt, how an answer is scored.

The templates of LongBench, LongBench v2 and RULER (``templates.json``) are the authors'. The others are longdraft's.
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

from longdraft.bench import examples, ruler
from longdraft.bench.conversations import mrcr_samples, turn_samples
from longdraft.bench.data import Sample
from longdraft.bench.examples import Example
from longdraft.bench.scores import CLASSES, CONTAINS, ROUGE
from longdraft.errors import CapabilityError, PromptError

# One archive of LongBench's repository holds all data sets. It is read without the repository's loading script.
_LONGBENCH = "zip://data/{name}.jsonl::hf://datasets/THUDM/LongBench/data.zip"
_TEMPLATES: dict[str, str] = json.loads(resources.files(__package__).joinpath("templates.json").read_text("utf-8"))
# Rows of SPEED-Bench begin with this notice if SPEED-Bench may not publish their text.
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
        metric, score_first_line, no_chat_template, truncate_middle: see :class:`~longdraft.bench.data.Sample`.
        map_columns: returns the columns for the template. A column ``part`` extends the data set's name in reports.
        make_samples: makes the samples of a row in place of the template; used for conversations.
    """

    template: str
    document_columns: tuple[str, ...] = ("context",)
    answer_columns: tuple[str, ...] = ("answers", "answer")
    hub: Columns = field(default_factory=dict)
    metric: str = ""
    score_first_line: bool = False
    no_chat_template: bool = False
    truncate_middle: bool = False
    map_columns: Callable[[Example], Columns] = lambda example: example.columns
    make_samples: Callable[[Example], Iterable[Sample]] | None = None


def _longbench(name: str, metric: str) -> Task:
    return Task(
        _TEMPLATES[name], hub={"path": "json", "data_files": _LONGBENCH.format(name=name), "split": "train"},
        metric=metric, truncate_middle=True, score_first_line=name in _FEW_SHOT,
        no_chat_template=name in _FEW_SHOT | _CODE,
    )  # fmt: skip


def _spec_bench(example: Example) -> Columns:
    """Takes the first turn of a question of Spec-Bench. ``part``: the category; the categories of MT-bench are one."""
    category = str(example.columns.get("category", ""))
    parts = ("translation", "summarization", "qa", "math_reasoning", "rag")
    return {"context": (example.columns.get("turns") or [""])[0], "part": category if category in parts else "mt_bench"}


def _speed_bench(example: Example) -> Columns:
    """Takes the first turn of a question of SPEED-Bench. ``part``: the category; in throughput splits split/category.

    Raises:
        PromptError: the row is a placeholder for a text that SPEED-Bench may not publish.
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


_FEW_SHOT, _CODE = {"trec", "triviaqa", "samsum"}, {"lcc", "repobench-p"}
_LONGBENCH_NAMES = {  # by metric
    "f1": "narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa musique triviaqa",
    ROUGE: "gov_report qmsum multi_news samsum",
    CLASSES: "trec",
    "numbers": "passage_count passage_retrieval_en",
    "edit_similarity": "lcc repobench-p",
}
TASKS = {
    **{name: _longbench(name, metric) for metric, names in _LONGBENCH_NAMES.items() for name in names.split()},
    "longbench-v2": Task(
        _TEMPLATES["longbench-v2"], hub={"path": "THUDM/LongBench-v2", "split": "train"}, metric="choice",
        truncate_middle=True,
    ),
    "ruler": Task("{context}", ("input",), ("outputs",), metric=CONTAINS),
    "spec-bench": Task("{context}", map_columns=_spec_bench),
    "speed-bench": Task("{context}", map_columns=_speed_bench),
    "mrcr": Task(
        "", hub={"path": "openai/mrcr", "split": "train"}, metric="similarity", make_samples=mrcr_samples
    ),
    "trajectories": Task("", make_samples=turn_samples),
    "pg19": Task(
        "{context}\n\nWrite on where this book stops.", ("text",), hub={"path": "emozilla/pg19", "split": "test"}
    ),
    "booksum": Task(
        "This is a chapter of a novel.\n\n{context}\n\nWrite a summary of this chapter.",
        ("chapter", "text"), ("summary_text", "summary"), {"path": "kmfoda/booksum", "split": "test"}, ROUGE,
    ),
    "aime24": Task(
        "{context}\n\nThink step by step, and end with the answer, which is a whole number from 0 to 999.",
        ("problem", "Problem"), ("answer", "Answer"), {"path": "HuggingFaceH4/aime_2024", "split": "train"}, "number",
    ),
}  # fmt: skip
NAMES = (*TASKS, *ruler.TASKS, BUILT_IN)
"""Names of all data sets."""


def load_samples(names: Sequence[str], limit: int | None = None) -> list[Sample]:
    """Makes the samples of the first ``limit`` rows of each data set.

    Args:
        names: what to read. ``TASK``: rows from the Hugging Face hub. ``TASK=PATH``: a file, folder or archive in the
            task's format. ``FILE``: prompts, see :func:`read_samples`. ``niah_single`` or another task of RULER:
            samples made in noise; with ``=FILE``, in the file's text. ``stdlib``: the built-in samples.

    Raises:
        PromptError: a file or a row cannot be used.
        CapabilityError: the ``datasets`` library is missing, or the hub cannot be reached.
    """
    return [sample for name in names for sample in _load(name, limit)]


def _load(name: str, limit: int | None) -> list[Sample]:
    """Makes the samples of one data set. ``name``: see :func:`load_samples`."""
    if name == BUILT_IN:
        return built_in_samples()[:limit]
    task, equals, file = name.partition("=")
    path = Path(file).expanduser()
    if task in ruler.TASKS:
        template = _TEMPLATES["vt" if task == "vt" else "niah"]
        return ruler.make_samples(task, template, read_document(path) if equals else None, limit)
    if task in TASKS:
        if not equals and not TASKS[task].hub:
            raise CapabilityError(f"{task} is not fetched from the hub: give --data {task}=PATH (file or folder).")
        rows = examples.read_path(path, task, limit) if equals else examples.read_hub(task, TASKS[task].hub, limit)
        return [sample for row in rows for sample in _make_samples(task, row)]
    path = Path(name).expanduser()
    if not path.exists() and not path.suffix:
        raise PromptError(f"{name} is neither a file nor the name of a data set ({', '.join(NAMES)}).")
    return read_samples([path], limit)


def read_samples(paths: Iterable[Path], limit: int | None = None) -> list[Sample]:
    """Makes a sample of each of the first ``limit`` rows of each JSONL file.

    A row has ``text`` (a whole prompt), or ``context`` and ``input`` as in LongBench.

    Raises:
        PromptError: a file is missing, empty or not JSONL, or a row has no text. The message names file and line.
    """
    return [_make_plain_sample(example) for path in paths for example in examples.read_jsonl(path, limit)]


def _make_plain_sample(example: Example) -> Sample:
    """Makes a sample of a row that has no task's template. It is scored like the task that the row's data set names."""
    columns, origin = example.columns, example.origin
    if "text" in columns:
        document, instruction = columns["text"], ""
    elif "context" in columns:
        document, instruction = columns["context"], columns.get("input") or ""
    else:
        raise PromptError(
            f"{origin} has neither `text` nor `context` and `input`; it has {', '.join(columns) or 'nothing'}."
        )
    if not isinstance(document, str) or not isinstance(instruction, str) or not document.strip():
        raise PromptError(f"{origin}: its text is empty or not a string.")
    dataset = str(columns.get("dataset") or example.stem)
    answers = _reference_answers(columns, "answers", "answer")
    task = TASKS.get("ruler" if dataset in ruler.TASKS else dataset)
    return Sample(document, instruction, dataset, origin, **_scoring(task, columns, answers))


def read_document(path: Path) -> str:
    """Returns the text of a plain file, or the documents of a JSONL file, joined by blank lines.

    Raises:
        PromptError: the file cannot be read.
    """
    if path.suffix == ".jsonl":
        return "\n\n".join(sample.document for sample in read_samples([path]))
    return examples.read_text(path)


def built_in_samples() -> list[Sample]:
    """Makes two samples of each of some long source files of the standard library: to summarise and to quote."""
    samples = []
    for name in _BUILT_IN_MODULES:
        text = module_source(name).read_text(encoding="utf-8")
        for dataset, instruction in _BUILT_IN_TASKS.items():
            samples.append(Sample(text, instruction, dataset, f"{name}.py"))
    return samples


def module_source(module: str) -> Path:
    """Finds the source file of a module of the standard library.

    Raises:
        PromptError: this Python has no source files.
    """
    spec = importlib.util.find_spec(module)
    path = Path((spec and spec.origin) or "")
    if path.suffix != ".py" or not path.is_file():
        raise PromptError("This Python comes without the sources of its modules: give other data with --data.")
    return path


def _make_samples(name: str, example: Example) -> Iterable[Sample]:
    """Makes the samples of a row. ``name``: the name of the data set."""
    task = TASKS[name]
    if task.make_samples is not None:
        return task.make_samples(example)
    columns, template_parts = task.map_columns(example), task.template.split("{context}")
    document_column = next((column for column in task.document_columns if column in columns), None)
    placeholders = re.findall(r"\{(\w+)\}", "".join(template_parts))
    if document_column is None or not all(placeholder in columns for placeholder in placeholders):
        needed = " and ".join([" or ".join(task.document_columns), *placeholders])
        present = ", ".join(example.columns)
        raise PromptError(f"{example.origin} is no row of {name}: it lacks {needed}; it has {present}.")
    document, values = columns[document_column], {column: columns[column] or "" for column in placeholders}
    all_strings = isinstance(document, str) and all(isinstance(value, str) for value in values.values())
    if not all_strings or not document.strip():
        used = " or ".join((document_column, *placeholders))
        raise PromptError(f"{example.origin}: its {used} is empty or not a string.")
    before, after = (re.sub(r"\{(\w+)\}", lambda match: values[match[1]], part) for part in template_parts)
    answers = _reference_answers(columns, *task.answer_columns)
    dataset = f"{name}/{columns['part']}" if "part" in columns else name
    return [
        Sample(
            document, after, dataset, example.origin, before, separator="", **_scoring(task, columns, answers),
            no_chat_template=task.no_chat_template, truncate_middle=task.truncate_middle,
        )
    ]  # fmt: skip


def _reference_answers(row: Mapping[str, Any], *columns: str) -> tuple[str, ...]:
    """Returns a row's reference answers, from the first of ``columns`` that the row has; empty if it has none."""
    answers = next((row[column] for column in columns if row.get(column) is not None), ())
    return tuple(map(str, answers)) if isinstance(answers, list | tuple) else (str(answers),)


def _scoring(task: Task | None, columns: Columns, answers: tuple[str, ...]) -> dict[str, Any]:
    """Returns the attributes of a Sample that say how an answer is scored."""
    attributes: dict[str, Any] = {"answers": answers, "classes": tuple(columns.get("all_classes") or ())}
    if task and answers:
        attributes |= {"metric": task.metric, "score_first_line": task.score_first_line}
    return attributes
