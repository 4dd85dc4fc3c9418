"""Finds where two outputs differ, and whether rounding explains it.

Two correct programs sum a token's logits in different orders, so the last bits differ. If the two best tokens are that
close, either may win: a near tie. Any other difference is a mismatch. Between longdraft's own exact methods on a CPU in
float32 there is no difference at all (docs/figures.md).
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

# Rows of an answer whose logits are held at a time.
LOGITS_CHUNK = 128

MAX_ULPS = {4: 64, 8: 64, 2: 4}
"""By bytes of the model's dtype: the largest distance of two logits, in spacings, whose order rounding can change.

The spacing is that of neighbouring numbers of the dtype at the size of the larger logit. In float16 and bfloat16 each
result is rounded to the dtype after a sum in float32, in float32 each term of a sum is, hence more. Measured on
SmolLM2-135M between transformers with and without a cache, and longdraft's trees and steps: the distance of the two
best logits changes by up to 3 spacings in bfloat16 and float16, and by up to 14 in float32. Larger models sum longer.
"""


def near_tie(gap: float, logit: float, dtype: torch.dtype) -> bool:
    """True if rounding can swap two logits that are ``gap`` apart, the larger one being ``logit``."""
    if not math.isfinite(gap) or not math.isfinite(logit):
        return False
    spacing = 2.0 ** (math.frexp(logit)[1] - 1) * torch.finfo(dtype).eps
    return gap <= MAX_ULPS[dtype.itemsize] * spacing


@dataclass(frozen=True)
class Difference:
    """The first place where two outputs differ.

    Attributes:
        position: index of the new token, 0 for the first.
        token, reference: the two tokens there; None if that output had already ended.
        gap: distance of their logits under the target, after the greedy processors; inf where one has ended.
        near_tie: :func:`near_tie` of the two.
    """

    position: int
    token: int | None
    reference: int | None
    gap: float
    near_tie: bool = False


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs, or where the shorter one ends; None when they are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def compare_outputs(
    runner: TargetRunner,
    prompt: Sequence[int],
    tokens: Sequence[int],
    reference: Sequence[int],
    sampling: Sampling | None = None,
    cache: PromptCache | None = None,
) -> Difference | None:
    """The first difference between two outputs of a prompt, judged by the target; None when they are equal.

    Args:
        sampling: how the tokens were sampled. Its processors are applied first, as the gap is that of the scores
            that were compared; sampling compares no two logits, so temperatures are judged on them all the same.
        cache: KV of the prompt, so that the judge need not read it again.
    """
    at = first_difference(tokens, reference)
    if at is None:
        return None
    if at >= min(len(tokens), len(reference)):
        token = tokens[at] if at < len(tokens) else None
        return Difference(at, token, reference[at] if at < len(reference) else None, math.inf)
    text = [*prompt, *tokens[:at]]
    *_, (_, _, out) = forward_in_chunks(runner, cache or PromptCache(), text, text)
    assert out.logits is not None
    logits = out.logits[0, -1]
    processors = (sampling or Sampling()).processors()
    scores = processors(torch.tensor([text], device=logits.device), logits[None].clone())[0]
    pair = scores[[tokens[at], reference[at]]]
    gap = float((pair[0] - pair[1]).abs())
    if math.isnan(gap):  # two tokens that a filter has both ruled out: neither should have been sampled
        gap = math.inf
    return Difference(at, tokens[at], reference[at], gap, near_tie(gap, float(pair.max()), runner.kv_shape.dtype))


def forward_in_chunks(
    runner: TargetRunner,
    cache: PromptCache,
    text: Sequence[int],
    known: Sequence[int],
    logits_from: int | None = None,
) -> Iterator[tuple[int, Sequence[int], TargetOutput]]:
    """Exact forwards of the target over a text, a piece each: its position, its tokens and the forward's output.

    Args:
        cache: keeps the text's KV afterwards.
        known: the beginning of the text whose KV is taken from the cache, as far as it is there.
        logits_from: position of the first row whose logits are computed; None: only those of the text's last row.
    """
    store = cache.open(runner.new_store, 1, len(text))
    cache.reuse_prefix(0, known, rope_regime=runner.rope_regime(len(text)))
    try:
        while (done := store.lengths[0]) < len(text):
            answer = logits_from is not None and done >= logits_from
            end = done + LOGITS_CHUNK if answer else min(done + default_chunk_size(runner), logits_from or len(text))
            piece = text[done:end]
            logits: Literal["all", "last", "none"] = "all" if answer else "last" if end >= len(text) else "none"
            block = store.make_forward_batch([0], [piece], is_prefill=not answer, prompt_len=len(text))
            out = runner.forward(block, store, logits=logits)
            store.commit(0, range(len(piece)))
            yield done, piece, out
    finally:
        cache.record_tokens(0, text)
