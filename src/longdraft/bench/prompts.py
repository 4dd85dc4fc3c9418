"""The prompts of a benchmark: encoded, cut to length and grouped into batches."""

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
    """An encoded sample.

    Attributes:
        context: the requested length in tokens; None: not cut.
        joined: the document holds the texts of several samples.
    """

    sample: Sample
    token_ids: tuple[int, ...]
    context: int | None = None
    joined: bool = False

    @cached_property
    def digest(self) -> str:
        """A fingerprint of the token ids."""
        return hashlib.sha256(json.dumps(self.token_ids).encode()).hexdigest()[:16]

    @property
    def seed(self) -> int:
        """A seed from the token ids, so that prompts are sampled independently."""
        return int(self.digest[:8], 16)


PromptBatch = tuple[Prompt, ...]
"""Prompts that are decoded together."""


def encode_prompts(samples: Sequence[Sample], loaded: LoadedModel, settings: Settings) -> list[Prompt]:
    """Encodes every sample at every context length.

    Raises:
        ContextError: a prompt and its new tokens exceed the model's context. Names file and line.
    """
    limit = TargetRunner(loaded.model).context_length
    prompts = []
    for sample in samples:
        for context in settings.contexts:
            tokens = encode_truncated(sample, loaded.tokenizer, context, settings.raw, **settings.template_kwargs)
            if len(tokens) + settings.max_tokens > limit:
                longest = limit - settings.max_tokens
                advice = f"Cut the documents with --context {longest}" if longest > 0 else "Lower --max-tokens"
                raise ContextError(
                    f"{sample.origin} has {len(tokens)} tokens; with {settings.max_tokens} new ones that is more than "
                    f"the model's context of {limit}. {advice}."
                )
            prompts.append(Prompt(sample, tuple(tokens), context))
    return prompts


def prompts_of_length(
    samples: Sequence[Sample], length: int, max_prompt_tokens: int, tokenizer: PreTrainedTokenizerBase,
    short: ShortTextPolicy, raw: bool = False, **template_kwargs: Any,
) -> tuple[list[Prompt], list[str]]:  # fmt: skip
    """Cuts each sample's prompt to a length. Returns the prompts, and notes on texts that are too short.

    Args:
        length: requested tokens of a prompt.
        max_prompt_tokens: upper limit of ``length``: the model's context without the new tokens.
        raw, template_kwargs: see :meth:`~longdraft.bench.data.Sample.encode`.
    """
    size, prompts, short_lengths = min(length, max_prompt_tokens), [], []
    for i, sample in enumerate(samples):
        joined = sample
        if short == "join" and not sample.last_message:  # conversations are not joined
            joined = _join_texts(sample, [*samples[i + 1 :], *samples[:i]], size, tokenizer, raw, **template_kwargs)
        token_ids = encode_truncated(joined, tokenizer, size, raw, **template_kwargs)
        # A cut may come out a token or two below the size: a text is short only if it is so before the cut.
        if is_short := len(token_ids) < size and len(joined.encode(tokenizer, raw, **template_kwargs)) < size:
            short_lengths.append(len(token_ids))
        if not is_short or short == "keep":
            prompts.append(Prompt(sample, tuple(token_ids), length, joined is not sample))
    notes = []
    if count := sum(prompt.joined for prompt in prompts):
        notes.append(f"{length:,} tokens: {count} of {len(samples)} texts go on with the texts of the next rows.")
    if short_lengths:
        some = len(short_lengths) < len(samples)
        subject = f"{len(short_lengths)} of {len(samples)} texts are not" if some else "no text is"
        action = "taken as they are" if short == "keep" else "left out"
        notes.append(f"{length:,} tokens: {subject} that long (at most {max(short_lengths):,}); {action}.")
    return prompts, notes


def _join_texts(
    sample: Sample,
    candidates: Sequence[Sample],
    size: int,
    tokenizer: PreTrainedTokenizerBase,
    raw: bool,
    **kwargs: Any,
) -> Sample:
    """Appends documents of the sample's data set, each once, until its prompt has ``size`` tokens."""
    documents = [s.document for s in candidates if s.dataset == sample.dataset and s.document != sample.document]
    for document in dict.fromkeys(documents):
        if len(sample.encode(tokenizer, raw, **kwargs)) >= size:
            break
        sample = replace(sample, document=f"{sample.document}\n\n{document}")
    return sample


def make_batches(prompts: Sequence[Prompt], sizes: Sequence[int]) -> tuple[list[PromptBatch], dict[int, int]]:
    """Full batches of prompts of one data set and context; and by batch size, the number of prompts left over.

    Raises:
        PromptError: no data set fills a batch.
    """
    groups: dict[tuple[str, int | None], list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault((prompt.sample.dataset, prompt.context), []).append(prompt)
    sizes = list(dict.fromkeys(sizes))
    for size in sizes:
        if all(len(group) < size for group in groups.values()):
            raise PromptError(f"No dataset has {size} samples, so there is no batch of {size}. Lower --batch.")
    starts = [(group, n, i) for group in groups.values() for n in sizes for i in range(0, len(group) - n + 1, n)]
    left_over = {n: sum(len(group) % n for group in groups.values()) for n in sizes}
    return [tuple(group[i : i + n]) for group, n, i in starts], left_over
