"""The prompts of a benchmark: encoded, cut to length, and put into batches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from longdraft.bench.data import Sample, ShortTextPolicy, encode_truncated
from longdraft.bench.settings import Settings
from longdraft.errors import ContextError, PromptError
from longdraft.model.checkpoints import LoadedModel
from longdraft.model.runner import TargetRunner

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prompt:
    """A sample's tokens.

    Attributes:
        context: the length that it was to have; None: it is whole. joined: it holds the texts of several rows.
    """

    sample: Sample
    token_ids: tuple[int, ...]
    context: int | None = None
    joined: bool = False

    @cached_property
    def digest(self) -> str:
        """A fingerprint of its tokens."""
        return hashlib.sha256(json.dumps(self.token_ids).encode()).hexdigest()[:16]

    @property
    def seed(self) -> int:
        """A seed of its own, so that the texts' samples are independent."""
        return int(self.digest[:8], 16)


PromptBatch = tuple[Prompt, ...]
"""Prompts that are decoded together."""


def encode_prompts(samples: Sequence[Sample], loaded: LoadedModel, settings: Settings) -> list[Prompt]:
    """Encodes every sample for every context before anything is measured.

    Raises:
        ContextError: a prompt with its new tokens exceeds the model's context. Names file and line.
    """
    limit = TargetRunner(loaded.model).context_length
    prompts = []
    for sample in samples:
        for context in settings.contexts:
            tokens = encode_truncated(sample, loaded.tokenizer, context, settings.raw, **settings.asked)
            if len(tokens) + settings.max_tokens > limit:
                room = limit - settings.max_tokens
                advice = f"Cut the documents with --context {room}" if room > 0 else "Ask for fewer with --max-tokens"
                raise ContextError(
                    f"{sample.origin} has {len(tokens)} tokens; with {settings.max_tokens} new ones that is more than "
                    f"the model's context of {limit}. {advice}."
                )
            prompts.append(Prompt(sample, tuple(tokens), context))
    return prompts


def prompts_of_length(
    samples: Sequence[Sample],
    length: int,
    max_prompt_tokens: int,
    tokenizer: PreTrainedTokenizerBase,
    short: ShortTextPolicy,
    raw: bool = False,
    **asked: Any,
) -> tuple[list[Prompt], list[str]]:
    """Every sample's prompt of a length, and notes on the texts that are shorter.

    Args:
        length: tokens of context. room: largest count of prompt tokens, since new ones have to fit behind it.
        raw, asked: of :meth:`~longdraft.bench.data.Sample.encode`.
    """
    size, found, lacking = min(length, max_prompt_tokens), [], []
    for i, sample in enumerate(samples):
        longer = sample
        if short == "join" and not sample.last_message:  # a conversation ends where it ends
            longer = _joined(sample, [*samples[i + 1 :], *samples[:i]], size, tokenizer, raw, **asked)
        tokens = encode_truncated(longer, tokenizer, size, raw, **asked)
        # A text that was cut lacks a token or two where one more would have been too many.
        if uncut := len(tokens) < size and len(longer.encode(tokenizer, raw, **asked)) < size:
            lacking.append(len(tokens))
        if not uncut or short == "keep":
            found.append(Prompt(sample, tuple(tokens), length, longer is not sample))
    notes = []
    if joined := sum(text.joined for text in found):
        notes.append(f"{length:,} tokens: {joined} of {len(samples)} texts go on with those of the rows after them.")
    if lacking:
        none = "no text is" if len(lacking) == len(samples) else f"{len(lacking)} of {len(samples)} texts are not"
        fate = "taken as they are" if short == "keep" else "left out"
        notes.append(f"{length:,} tokens: {none} that long (the longest of them: {max(lacking):,}); {fate}.")
    return found, notes


def _joined(
    sample: Sample, others: Sequence[Sample], size: int, tokenizer: PreTrainedTokenizerBase, raw: bool, **asked: Any
) -> Sample:
    """The sample with the texts of others of its dataset behind its own, each text once, until it is long enough."""
    more = dict.fromkeys(s.document for s in others if s.dataset == sample.dataset and s.document != sample.document)
    for document in more:
        if len(sample.encode(tokenizer, raw, **asked)) >= size:
            break
        sample = replace(sample, document=f"{sample.document}\n\n{document}")
    return sample


def make_batches(prompts: Sequence[Prompt], sizes: Sequence[int]) -> tuple[list[PromptBatch], dict[int, int]]:
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
