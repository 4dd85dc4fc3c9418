"""Encodes the prompts of a benchmark, cuts them to a length and groups them into batches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

from longdraft.bench.data import Sample, ShortTextPolicy, encode_truncated
from longdraft.bench.settings import Settings
from longdraft.errors import ContextError, PromptError
from longdraft.model.load.checkpoints import LoadedModel
from longdraft.model.runner import TargetRunner

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prompt:
    """An encoded sample."""

    sample: Sample  # before it was cut and joined
    token_ids: tuple[int, ...]
    context: int | None = None  # the requested length in tokens; None: not cut
    joined: bool = False  # the texts of other samples were appended to the document

    @cached_property
    def digest(self) -> str:
        """Identifies the token ids: the first 64 bits of their SHA-256."""
        return hashlib.sha256(json.dumps(self.token_ids).encode()).hexdigest()[:16]

    @property
    def seed(self) -> int:
        """A seed from the token ids (32 bits), so that each prompt is sampled with its own random numbers."""
        return int(self.digest[:8], 16)


PromptBatch = tuple[Prompt, ...]
"""Prompts that are decoded together."""


def encode_prompts(samples: Sequence[Sample], loaded: LoadedModel, settings: Settings) -> list[Prompt]:
    """Encodes every sample at every context length.

    Raises:
        ContextError: a prompt and its new tokens exceed the model's context. The message names file and line.
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
        short: what to do with a text that is too short.
        raw, template_kwargs: see :meth:`~longdraft.bench.data.Sample.encode`.
    """
    num_tokens, prompts, short_lengths = min(length, max_prompt_tokens), [], []
    for i, sample in enumerate(samples):
        longer = sample
        if short == "join" and not sample.messages:  # conversations are not joined
            others = [*samples[i + 1 :], *samples[:i]]
            longer = _join_texts(sample, others, num_tokens, tokenizer, raw, **template_kwargs)
        token_ids = encode_truncated(longer, tokenizer, num_tokens, raw, **template_kwargs)
        # A long text too may lack a token or two after the cut. So a short prompt is encoded again without a cut.
        is_short = len(token_ids) < num_tokens and len(longer.encode(tokenizer, raw, **template_kwargs)) < num_tokens
        if is_short:
            short_lengths.append(len(token_ids))
        if not is_short or short == "keep":
            prompts.append(Prompt(sample, tuple(token_ids), length, joined=longer is not sample))
    notes = []
    if num_joined := sum(prompt.joined for prompt in prompts):
        notes.append(f"{length:,} tokens: {num_joined} of {len(samples)} texts go on with the texts of the next rows.")
    if short_lengths:
        all_short = len(short_lengths) == len(samples)
        subject = "no text is" if all_short else f"{len(short_lengths)} of {len(samples)} texts are not"
        action = "taken as they are" if short == "keep" else "left out"
        notes.append(f"{length:,} tokens: {subject} that long (at most {max(short_lengths):,}); {action}.")
    return prompts, notes


def _join_texts(
    sample: Sample, others: Sequence[Sample], num_tokens: int, tokenizer: PreTrainedTokenizerBase, raw: bool,
    **kwargs: Any,
) -> Sample:  # fmt: skip
    """Appends other documents of the sample's data set, each once, until the prompt has ``num_tokens`` tokens."""
    documents = [other.document for other in others if other.dataset == sample.dataset]
    for document in dict.fromkeys(document for document in documents if document != sample.document):
        if len(sample.encode(tokenizer, raw, **kwargs)) >= num_tokens:
            break
        sample = replace(sample, document=f"{sample.document}\n\n{document}")
    return sample


def make_batches(prompts: Sequence[Prompt], sizes: Sequence[int]) -> tuple[list[PromptBatch], dict[int, int]]:
    """Groups prompts of the same data set and context into full batches. Returns the batches, and by batch size the
    number of prompts that fill no batch.

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
    batches = []
    for group, size in product(groups.values(), sizes):
        batches += [tuple(group[start : start + size]) for start in range(0, len(group) - size + 1, size)]
    return batches, {size: sum(len(group) % size for group in groups.values()) for size in sizes}
