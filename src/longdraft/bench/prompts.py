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


def grid(prompts: Sequence[Prompt], sizes: Sequence[int]) -> tuple[list[Group], dict[int, int]]:
    """All batches of exactly these sizes, by data set and context; and by size how many prompts are left over.

    Raises:
        PromptError: no data set fills a batch.
    """
    cells: dict[tuple[str, int | None], list[Prompt]] = {}
    for prompt in prompts:
        cells.setdefault((prompt.sample.dataset, prompt.context), []).append(prompt)
    sizes = list(dict.fromkeys(sizes))
    for size in sizes:
        if all(len(own) < size for own in cells.values()):
            raise PromptError(f"No dataset has {size} samples, so there is no batch of {size}. Lower --batch.")
    starts = [(own, n, i) for own in cells.values() for n in sizes for i in range(0, len(own) - n + 1, n)]
    left = {n: sum(len(own) % n for own in cells.values()) for n in sizes}
    return [tuple(own[i : i + n]) for own, n, i in starts], left
