"""Finds where two outputs differ, and whether rounding explains the difference.

Two correct programs may sum a token's logits in different orders, so that the last bits differ. If the two best logits
are that close, either token may win: a near tie. Any other difference is a mismatch. Between longdraft's own exact
methods on a CPU in float32 there is no difference at all (docs/figures.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from longdraft.engine.prefill import default_chunk_size
from longdraft.engine.sampler import Sampling
from longdraft.memory.prompt_cache import PromptCache
from longdraft.model.outputs import TargetOutput
from longdraft.model.runner import TargetRunner

# Number of tokens whose logits are computed in one forward: logits take memory.
LOGITS_CHUNK = 128

MAX_ULPS = {4: 64, 8: 64, 2: 4}
"""By the size of the model's dtype in bytes: the largest distance (in ulps) of two logits that rounding can swap.

An ulp is the distance between neighbouring numbers of the dtype at the size of the larger logit. In float16 and
bfloat16 a sum is computed in float32 and rounded once; in float32 every addition rounds. On SmolLM2-135M the distance
of the two best logits changed by up to 3 ulps in bfloat16 and float16, and by up to 14 in float32, between transformers
with and without a cache and longdraft with and without trees. Larger models have longer sums, so the limits are higher.
"""


def near_tie(gap: float, logit: float, dtype: torch.dtype) -> bool:
    """Returns True if rounding can swap two logits. ``gap``: their distance; ``logit``: the larger of the two."""
    if not math.isfinite(gap) or not math.isfinite(logit):
        return False
    ulp = 2.0 ** (math.frexp(logit)[1] - 1) * torch.finfo(dtype).eps  # frexp's mantissas are in [0.5, 1)
    return gap <= MAX_ULPS[dtype.itemsize] * ulp


@dataclass(frozen=True)
class Difference:
    """The first difference of two outputs."""

    position: int  # index of the differing token in the outputs, from 0
    token: int | None  # the output's token at this position; None if the output ends before it
    reference: int | None  # the reference's token at this position; None if the reference ends before it
    gap: float  # distance of the target's logits of the two tokens, after logits processors; inf if an output has ended
    near_tie: bool = False  # rounding can swap the two logits, see ``near_tie``


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Returns the index of the first differing token, or of the end of an output that the other continues. Returns None
    if the outputs are equal."""
    for index, (token_a, token_b) in enumerate(zip(a, b, strict=False)):
        if token_a != token_b:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def compare_outputs(
    runner: TargetRunner, prompt: Sequence[int], tokens: Sequence[int], reference: Sequence[int],
    sampling: Sampling | None = None, cache: PromptCache | None = None,
) -> Difference | None:  # fmt: skip
    """Returns the first difference between two outputs of a prompt; None if the outputs are equal.

    Args:
        sampling: how the tokens were sampled. Its logits processors are applied before the gap is measured.
        cache: may hold the KV of the prompt, which then is not computed again.
    """
    position = first_difference(tokens, reference)
    if position is None:
        return None
    if position >= min(len(tokens), len(reference)):
        token = tokens[position] if position < len(tokens) else None
        return Difference(position, token, reference[position] if position < len(reference) else None, math.inf)
    context = [*prompt, *tokens[:position]]
    *_, (_, _, last_output) = forward_in_chunks(runner, cache or PromptCache(), context, context)
    assert last_output.logits is not None
    logits = last_output.logits[0, -1]
    processors = (sampling or Sampling()).processors()
    scores = processors(torch.tensor([context], device=logits.device), logits[None].clone())[0]
    token_score, reference_score = scores[tokens[position]], scores[reference[position]]
    gap = float((token_score - reference_score).abs())
    if math.isnan(gap):  # a filter has excluded both tokens (-inf): neither should have been sampled
        gap = math.inf
    is_near_tie = near_tie(gap, float(torch.maximum(token_score, reference_score)), runner.kv_shape.dtype)
    return Difference(position, tokens[position], reference[position], gap, is_near_tie)


def forward_in_chunks(
    runner: TargetRunner, cache: PromptCache, context: Sequence[int], prefix: Sequence[int],
    logits_from: int | None = None,
) -> Iterator[tuple[int, Sequence[int], TargetOutput]]:  # fmt: skip
    """Runs the target over a context in chunks. Yields each chunk's position, its tokens and the forward's output.

    Args:
        cache: afterwards holds the KV of the context.
        prefix: the first tokens of the context. Only the KV of these tokens may come from the cache.
        logits_from: the first position whose logits are computed; None: only the last position of the context.
    """
    store = cache.open(runner.new_store, 1, len(context))
    cache.reuse_prefix(0, prefix, rope_regime=runner.rope_regime(len(context)))
    try:
        while (start := store.lengths[0]) < len(context):
            needs_logits = logits_from is not None and start >= logits_from
            prefill_end = min(start + default_chunk_size(runner), logits_from or len(context))
            end = start + LOGITS_CHUNK if needs_logits else prefill_end
            chunk = context[start:end]
            is_last = end >= len(context)
            logits: Literal["all", "last", "none"] = "all" if needs_logits else "last" if is_last else "none"
            batch = store.make_forward_batch([0], [chunk], is_prefill=not needs_logits, prompt_len=len(context))
            out = runner.forward(batch, store, logits=logits)
            store.commit(0, range(len(chunk)))
            yield start, chunk, out
    finally:
        cache.record_tokens(0, context)
