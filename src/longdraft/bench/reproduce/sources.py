"""The prompts of a table: from the user's files, from data sets by name, or from sources of Python's library."""

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
# Instructions for the modules, by the data set that they stand in for.
_CODE, _SUMMARY = "Write the line of code that comes next.", "Write a summary of this module, about one page long."
_INSTRUCTIONS = {
    "lcc": _CODE,
    "repobench-p": _CODE,
    "qmsum": "What does this module offer? Answer in a candidates sentences.",
    "multi_news": "Which classes does this module have, and what is each for?",
    "pg19": "Go on with this text where it stops.",
    "aime24": "Think step by step: which part of this is the most likely to go wrong, and how would you test it?",
}
# Rows read for each prompt, as some rows are too short.
_ROWS_PER_PROMPT = 8


@dataclass(frozen=True)
class SampleSources:
    """Where a table's samples come from.

    Attributes:
        files: the user's files, by data set.
        stand_ins: modules of Python's library stand in for a data set without a file; if False, the Hugging Face hub.
    """

    files: Mapping[str, str]
    stand_ins: bool

    def samples(self, dataset: str, count: int | None) -> list[Sample]:
        """Samples of a data set: several times ``count``, as some may be too short; None: all.

        Raises:
            PromptError: a file or a row cannot be used.
            CapabilityError: the hub cannot be reached.
        """
        limit = None if count is None else _ROWS_PER_PROMPT * count
        if (file := self.files.get(dataset)) is None:
            return stand_in_samples(dataset) if self.stand_ins else tasks.load_samples([dataset], limit)
        try:
            loaded = tasks.load_samples([f"{dataset}={file}"], limit)
        except PromptError:
            if not file.endswith(".jsonl"):
                raise
            loaded = data.read_samples([Path(file).expanduser()], limit)  # prompts instead of the data set's rows
        return [replace(sample, dataset=dataset) for sample in loaded]


def stand_in_samples(dataset: str) -> list[Sample]:
    """Long modules, each with an instruction like the data set's."""
    instruction = _INSTRUCTIONS.get(dataset, _SUMMARY)
    files = map(tasks.module_source, MODULES)
    return [Sample(path.read_text(encoding="utf-8"), instruction, dataset, path.name) for path in files]


def column_prompts(
    column: Column, scaled: ScaledTable, sources: SampleSources, loaded: LoadedModel, samples: Sequence[Sample]
) -> tuple[list[Prompt], list[str]]:
    """A column's prompts, and how they differ from the paper's.

    Raises:
        ContextError: the prompts exceed the model's context.
        PromptError: no sample is long enough.
    """
    limit = TargetRunner(loaded.model).context_length - scaled.max_tokens
    length = scaled.prompt_tokens(column)
    if limit < 1 or (length is not None and length > limit and not scaled.small):
        raise ContextError(
            f"{column.name} needs {f'{length:,} + ' if length else ''}{scaled.max_tokens:,} tokens, and the model's "
            f"context is {limit + scaled.max_tokens:,}: stretch it with --rope-factor, or take --scale small."
        )
    count = None if scaled.prompts is None else max(scaled.prompts, column.batch)
    is_stand_in = sources.stand_ins and column.dataset not in sources.files
    differences = [f"modules of Python's library in the place of {column.dataset}"] if is_stand_in else []
    tokenizer, kwargs = loaded.tokenizer, scaled.template_kwargs
    if length is None:
        prompts = [Prompt(s, tuple(encode_truncated(s, tokenizer, limit, **kwargs))) for s in samples[:count]]
        return prompts, differences
    if length > limit:
        differences.append(f"cut to {limit:,} tokens, which is all that fits the model's context")
        length = limit
    # Encoding takes time: try the first samples, and all of them only if some are too short.
    candidates = samples if count is None else samples[: _ROWS_PER_PROMPT * count]
    prompts, notes = prompts_of_length(candidates[:count], length, limit, tokenizer, "leave", **kwargs)
    if count is not None and len(prompts) < count:
        short: ShortTextPolicy = "join" if scaled.small else "leave"
        prompts, notes = prompts_of_length(candidates, length, limit, tokenizer, short, **kwargs)
    if not prompts:
        raise PromptError(f"{column.name}: {' '.join(notes)} Give longer ones with --data {column.dataset}=FILE.")
    prompts = prompts[:count]
    if any(prompt.joined for prompt in prompts):
        differences.append("texts go on with the texts of the next rows")
    return prompts, differences
