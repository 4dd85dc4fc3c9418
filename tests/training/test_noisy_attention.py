"""Training's two attentions against masks written out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longdraft.training.noisy_attention import causal, noisy, windowed
from tests.training.helpers import masked_attention


def tensors(heads: int, kv_heads: int, length: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    sizes = ((heads, length, 8), (kv_heads, length, 8), (kv_heads, length, 8))
    return tuple(torch.randn(size, generator=generator) for size in sizes)


HEADS = st.sampled_from([(1, 1), (4, 4), (6, 2), (3, 1)])


@given(HEADS, st.integers(2, 40), st.integers(1, 6), st.data())
def test_noisy_is_causal_with_the_newest_keys_hidden(heads, length, shift, data):
    q, k, v = tensors(*heads, length)
    rows = data.draw(st.integers(0, length - shift) if length > shift else st.just(0))
    if not rows:
        return
    at = torch.arange(length)
    expected = masked_attention(q, k, v, at[:, None] - at >= shift)[:, -rows:]
    torch.testing.assert_close(noisy(q[:, -rows:], k, v, shift), expected, rtol=1e-4, atol=1e-5)


@given(HEADS, st.integers(1, 50), st.integers(1, 20), st.data())
def test_windowed_is_a_band(heads, length, window, data):
    q, k, v = tensors(*heads, length)
    rows = data.draw(st.integers(1, length))
    behind = torch.arange(length)[:, None] - torch.arange(length)
    expected = masked_attention(q, k, v, (behind >= 0) & (behind < window))[:, -rows:]
    torch.testing.assert_close(windowed(q[:, -rows:], k, v, window), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [4, 100])
def test_gradients(window):
    length, rows = 23, 9
    behind = torch.arange(length)[:, None] - torch.arange(length)
    seen = (behind >= 0) & (behind < window)
    found = []
    for attend in (
        lambda q, k, v: windowed(q[:, -rows:], k, v, window),
        lambda q, k, v: masked_attention(q, k, v, seen)[:, -rows:],
    ):
        leaves = [t.requires_grad_() for t in tensors(4, 2, length)]
        (attend(*leaves) * torch.linspace(-1, 1, 8)).sum().backward()
        found.append([t.grad for t in leaves])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_rows_that_would_see_nothing_are_refused():
    q, k, v = tensors(2, 2, 5)
    with pytest.raises(ValueError, match="would see nothing"):
        causal(q, k[:, :3], v[:, :3])
