"""The texts of a table: files that the user gives, data sets by name, or sources of Python's library in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from longdraft.bench import data, tasks
from longdraft.bench.data import Sample, ShortTextPolicy, encode_truncated
from longdraft.bench.papers.table import Column
from longdraft.bench.prompts import Prompt, prompts_of_length
from longdraft.bench.reproduce.scaled import ScaledTable
from longdraft.errors import ContextError, PromptError
from longdraft.model.checkpoints import LoadedModel
from longdraft.model.runner import TargetRunner

# Long modules that every Python from 3.10 on has as one file.
MODULES = (
    "argparse", "typing", "inspect", "tarfile", "doctest", "pydoc", "_pydecimal", "subprocess", "mailbox", "difflib",
    "locale", "ipaddress", "pickle", "optparse", "threading", "imaplib",
)  # fmt: skip
# What is asked about a module in the place of a data set's rows.
_CODE, _SUMMARY = "Write the line of code that comes next.", "Write a summary of this module, about one page long."
_ASKED = {
    "lcc": _CODE,
    "repobench-p": _CODE,
    "qmsum": "What does this module offer? Answer in a few sentences.",
    "multi_news": "Which classes does this module have, and what is each for?",
    "pg19": "Go on with this text where it stops.",
    "aime24": "Think step by step: which part of this is the most likely to go wrong, and how would you test it?",
}
# Rows of a data set that are read for each prompt that is wanted: some are too short.
_SPARE = 8


@dataclass(frozen=True)
class SampleSources:
    """Where rows come from.

    Attributes:
        files: by data set.
        stand_in_samples: take modules of Python's library where no file is given; else the Hugging Face hub is asked.
    """

    files: Mapping[str, str]
    stand_ins: bool

    def samples(self, dataset: str, count: int | None) -> list[Sample]:
        """Rows of a data set, more than are wanted, since some may be too short.

        Raises:
            PromptError: a file or a row that cannot be used.
            CapabilityError: the hub cannot be reached; says which file to give.
        """
        limit = None if count is None else _SPARE * count
        if (file := self.files.get(dataset)) is None:
            return stand_in_samples(dataset) if self.stand_ins else tasks.load_samples([dataset], limit)
        try:
            found = tasks.load_samples([f"{dataset}={file}"], limit)
        except PromptError:
            if not file.endswith(".jsonl"):
                raise
            found = data.read_samples([Path(file).expanduser()], limit)  # rows of whole prompts
        return [replace(sample, dataset=dataset) for sample in found]


def stand_in_samples(dataset: str) -> list[Sample]:
    """Long modules, each with a question like the data set's."""
    asked = _ASKED.get(dataset, _SUMMARY)
    files = map(tasks.module_source, MODULES)
    return [Sample(path.read_text(encoding="utf-8"), asked, dataset, path.name) for path in files]


def column_prompts(
    column: Column, scaled: ScaledTable, sources: SampleSources, loaded: LoadedModel, rows: Sequence[Sample]
) -> tuple[list[Prompt], list[str]]:
    """A column's prompts, and what differs in them.

    Raises:
        ContextError: the model's context has no room for them.
        PromptError: no row is long enough.
    """
    room = TargetRunner(loaded.model).context_length - scaled.max_tokens
    length = scaled.prompt_tokens(column)
    if room < 1 or (length is not None and length > room and not scaled.small):
        raise ContextError(
            f"{column.name} is {length or 'any number of'} tokens and {scaled.max_tokens:,} new ones, and the model's "
            f"context is {room + scaled.max_tokens:,}: stretch it with --rope-factor, or take --scale small."
        )
    wanted = None if scaled.prompts is None else max(scaled.prompts, column.batch)
    instead = sources.stand_ins and column.dataset not in sources.files
    differs = [f"modules of Python's library in the place of {column.dataset}"] if instead else []
    if length is None:
        chosen = [
            Prompt(s, tuple(encode_truncated(s, loaded.tokenizer, room, **scaled.template_kwargs)))
            for s in rows[:wanted]
        ]
        return chosen, differs
    if length > room:
        differs.append(f"cut to {room:,} tokens, which is all that fits the model's context")
        length = room
    # A text is encoded whole, so no more of them than are needed.
    few = rows if wanted is None else rows[: _SPARE * wanted]
    found, notes = prompts_of_length(few[:wanted], length, room, loaded.tokenizer, "leave", **scaled.template_kwargs)
    if wanted is not None and len(found) < wanted:
        short: ShortTextPolicy = "join" if scaled.small else "leave"
        found, notes = prompts_of_length(few, length, room, loaded.tokenizer, short, **scaled.template_kwargs)
    if not found:
        raise PromptError(f"{column.name}: {' '.join(notes)} Give longer ones with --data {column.dataset}=FILE.")
    found = found[:wanted]
    if any(text.joined for text in found):
        differs.append("texts are joined with those of the rows after them")
    return found, differs
