"""Makes the prompts of a table: from the user's files, data sets of the hub, or modules of Python's library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from longdraft.bench import tasks
from longdraft.bench.data import Sample, ShortTextPolicy, encode_truncated
from longdraft.bench.papers.table import Column
from longdraft.bench.prompts import Prompt, prompts_of_length
from longdraft.bench.reproduce.scaled import ScaledTable
from longdraft.bench.thinking import with_thinking
from longdraft.errors import ContextError, PromptError
from longdraft.model.load.checkpoints import LoadedModel
from longdraft.model.runner import TargetRunner

# Long modules that every Python from 3.10 on has as one file.
MODULES = (
    "argparse", "typing", "inspect", "tarfile", "doctest", "pydoc", "_pydecimal", "subprocess", "mailbox", "difflib",
    "locale", "ipaddress", "pickle", "optparse", "threading", "imaplib",
)  # fmt: skip
# By data set: the instruction for the modules that stand in for the data set.
_CODE, _SUMMARY = "Write the line of code that comes next.", "Write a summary of this module, about one page long."
_INSTRUCTIONS = {
    "lcc": _CODE,
    "repobench-p": _CODE,
    "qmsum": "What does this module offer? Answer in a few sentences.",
    "multi_news": "Which classes does this module have, and what is each for?",
    "pg19": "Go on with this text where it stops.",
    "aime24": "Think step by step: which part of this is the most likely to go wrong, and how would you test it?",
}
# By data set of questions: the task of RULER that stands in for it, in RULER's noise.
QUESTIONS = {"hotpotqa": "niah_multikey", "musique": "vt", "longbench-v2": "niah_single"}
# Rows to read for each prompt that is needed: some rows are too short.
_ROWS_PER_PROMPT = 8


@dataclass(frozen=True)
class SampleSources:
    """Says where the samples of a table come from."""

    files: Mapping[str, str]  # the user's files, by data set
    use_stand_ins: bool  # where a data set has no file, use modules of Python's library; False: the Hugging Face hub

    def samples(self, dataset: str, num_prompts: int | None) -> list[Sample]:
        """Reads enough samples of a data set for ``num_prompts`` prompts, although some may be too short; None: all.

        Raises:
            PromptError: a file or a row cannot be used.
            CapabilityError: the hub cannot be reached.
        """
        limit = None if num_prompts is None else _ROWS_PER_PROMPT * num_prompts
        if (file := self.files.get(dataset)) is None:
            return stand_in_samples(dataset) if self.use_stand_ins else tasks.load_samples([dataset], limit)
        try:
            loaded = tasks.load_samples([f"{dataset}={file}"], limit)
        except PromptError:
            if not file.endswith(".jsonl"):
                raise
            loaded = tasks.read_samples([Path(file).expanduser()], limit)  # a file of prompts
        return [replace(sample, dataset=dataset) for sample in loaded]


def stand_in_samples(dataset: str) -> list[Sample]:
    """Makes a sample of each of :data:`MODULES`, with an instruction that resembles those of the data set. Questions
    with reference answers come from RULER."""
    if dataset in QUESTIONS:
        return [replace(sample, dataset=dataset) for sample in tasks.load_samples([QUESTIONS[dataset]])]
    instruction = _INSTRUCTIONS.get(dataset, _SUMMARY)
    files = map(tasks.module_source, MODULES)
    return [Sample(path.read_text(encoding="utf-8"), instruction, dataset, path.name) for path in files]


def column_prompts(
    column: Column, scaled: ScaledTable, sources: SampleSources, loaded: LoadedModel, samples: Sequence[Sample]
) -> tuple[list[Prompt], list[str]]:
    """Returns the prompts of a column, and descriptions of how the prompts differ from the paper's.

    Raises:
        ContextError: the prompts exceed the model's context.
        PromptError: no sample is long enough.
    """
    max_length = TargetRunner(loaded.model).context_length - scaled.new_tokens
    length = scaled.prompt_tokens(column)
    if max_length < 1 or (length is not None and length > max_length and not scaled.is_small):
        raise ContextError(
            f"{column.name} needs {f'{length:,} + ' if length else ''}{scaled.new_tokens:,} tokens, and the model's "
            f"context is {max_length + scaled.new_tokens:,}: stretch it with --rope-factor, or take --scale small."
        )
    num_prompts = None if scaled.num_prompts is None else max(scaled.num_prompts, column.batch)
    is_stand_in = sources.use_stand_ins and column.dataset not in sources.files
    substitute = (
        f"RULER's {QUESTIONS[column.dataset]}" if column.dataset in QUESTIONS else "modules of Python's library"
    )
    differences = [f"{substitute} in the place of {column.dataset}"] if is_stand_in else []
    if scaled.table.answer_tokens:
        samples = [with_thinking(sample) for sample in samples]
    tokenizer, kwargs = loaded.tokenizer, scaled.template_kwargs
    if length is None:
        uncut = samples[:num_prompts]
        prompts = [Prompt(sample, tuple(encode_truncated(sample, tokenizer, max_length, **kwargs))) for sample in uncut]
        return prompts, differences
    if length > max_length:
        differences.append(f"cut to {max_length:,} tokens, which is all that fits the model's context")
        length = max_length
    # Encoding takes time: try the first samples, and the further ones only if some of the first are too short.
    candidates = samples if num_prompts is None else samples[: _ROWS_PER_PROMPT * num_prompts]
    prompts, notes = prompts_of_length(candidates[:num_prompts], length, max_length, tokenizer, "leave", **kwargs)
    if num_prompts is not None and len(prompts) < num_prompts:
        short: ShortTextPolicy = "join" if scaled.is_small else "leave"
        prompts, notes = prompts_of_length(candidates, length, max_length, tokenizer, short, **kwargs)
    if not prompts:
        raise PromptError(f"{column.name}: {' '.join(notes)} Give longer ones with --data {column.dataset}=FILE.")
    prompts = prompts[:num_prompts]
    if any(prompt.joined for prompt in prompts):
        differences.append("texts go on with the texts of the next rows")
    return prompts, differences
