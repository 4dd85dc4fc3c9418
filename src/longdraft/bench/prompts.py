"""The prompts of a benchmark: encoded, cut to length, and put into batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longdraft.bench.data import Sample, fitted
from longdraft.bench.settings import Settings
from longdraft.errors import ContextError, PromptError
from longdraft.model.checkpoints import LoadedModel
from longdraft.model.runner import TargetRunner


@dataclass(frozen=True)
class Prompt:
    """A sample's tokens. ``context``: the length that it was cut to; None: it is whole."""

    sample: Sample
    tokens: tuple[int, ...]
    context: int | None = None


Group = tuple[Prompt, ...]
"""Prompts that are decoded together."""


def prepare(samples: Sequence[Sample], loaded: LoadedModel, settings: Settings) -> list[Prompt]:
    """Encodes every sample for every context before anything is measured.

    Raises:
        ContextError: a prompt with its new tokens exceeds the model's context. Names file and line.
    """
    limit = TargetRunner(loaded.model).context_length
    prompts = []
    for sample in samples:
        for context in settings.contexts:
            tokens = fitted(sample, loaded.tokenizer, context, settings.raw, **settings.asked)
            if len(tokens) + settings.max_tokens > limit:
                room = limit - settings.max_tokens
                advice = f"Cut the documents with --context {room}" if room > 0 else "Ask for fewer with --max-tokens"
                raise ContextError(
                    f"{sample.origin} has {len(tokens)} tokens; with {settings.max_tokens} new ones that is more than "
                    f"the model's context of {limit}. {advice}."
                )
            prompts.append(Prompt(sample, tuple(tokens), context))
    return prompts


def batches(prompts: Sequence[Prompt], size: int) -> tuple[list[Group], int]:
    """Batches of exactly ``size`` of one data set and context, and the count of prompts that are left over.

    Raises:
        PromptError: no data set fills a batch.
    """
    groups: dict[tuple[str, int | None], list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault((prompt.sample.dataset, prompt.context), []).append(prompt)
    full = [tuple(group[i : i + size]) for group in groups.values() for i in range(0, len(group) - size + 1, size)]
    if not full:
        raise PromptError(f"No dataset has {size} samples, so there is no batch of {size}. Lower --batch.")
    return full, len(prompts) - size * len(full)


def grid(prompts: Sequence[Prompt], settings: Settings) -> tuple[list[Group], dict[int, int]]:
    """All batches, by data set and context; and batch size -> count of prompts that are left over.

    Raises:
        PromptError: no data set fills a batch.
    """
    found: list[Group] = []
    left: dict[int, int] = {}
    for size in dict.fromkeys(settings.batches):
        full, left[size] = batches(prompts, size)
        found += full
    place = {cell: i for i, cell in enumerate(dict.fromkeys((p.sample.dataset, p.context) for p in prompts))}
    # The sort is stable: batches of a cell stay in their order.
    return sorted(found, key=lambda g: place[g[0].sample.dataset, g[0].context]), left
