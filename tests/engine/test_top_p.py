"""Sampling by top-p without a sort of the vocabulary: transformers' own choice, or word that it takes the sort."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TopKLogitsWarper, TopPLogitsWarper

from longdraft.engine import top_p


def logits(rows: int, vocabulary: int, spread: float, seed: int, rounded: bool) -> torch.Tensor:
    """Random logits; in bfloat16's steps, as models give them, many are equal."""
    found = spread * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))
    return found.bfloat16().float() if rounded else found


def both(scores: torch.Tensor, p: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens without the sort, and with it."""
    numbers = torch.empty_like(scores).exponential_(generator=torch.Generator().manual_seed(seed))
    sorted_ones = (TopPLogitsWarper(p)(None, scores).softmax(-1) / numbers).argmax(-1)
    return top_p.samples(scores, p, numbers), sorted_ones


@given(
    st.integers(2, 3000),
    st.floats(0.01, 12),
    st.floats(0.01, 0.9999),
    st.sampled_from([0, 1, 3, 50]),
    st.booleans(),
    st.integers(0, 1000),
    st.sampled_from([1, 16, 256]),
)
def test_the_token_is_transformers_own_or_unknown(vocabulary, spread, p, k, rounded, seed, likeliest):
    scores = logits(32, vocabulary, spread, seed, rounded)
    if k:
        scores = TopKLogitsWarper(k)(None, scores)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(top_p, "LIKELIEST", likeliest)
        found, expected = both(scores, p, seed)
    assert torch.equal(found[found >= 0], expected[found >= 0])


@pytest.mark.parametrize(("spread", "share"), [(5.0, 0.98), (3.0, 0.85)])
@pytest.mark.parametrize("rounded", [False, True])
def test_the_token_is_nearly_always_known(spread, share, rounded):
    found, expected = both(logits(150, 32_000, spread, 0, rounded), 0.9, 1)
    assert (found >= 0).float().mean() >= share
    assert torch.equal(found[found >= 0], expected[found >= 0])


def test_a_token_at_a_border_that_rounding_decides_is_unknown():
    """All tokens are equal: which of them are kept depends on the sort."""
    found, _ = both(torch.zeros(50, 8), 0.5, 0)
    assert (found == -1).all()


def test_small_vocabularies_are_sorted():
    assert not top_p.pays(1000) and top_p.pays(32_000)
