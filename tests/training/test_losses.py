"""The fused loss against torch's on whole logits."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from longdraft.training.losses import soft_cross_entropy, targets

SIZE, VOCAB, TOP = 12, 31, 4


def case(rows: int, outside: bool, seed: int):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, SIZE, generator=g)
    head = torch.randn(VOCAB, SIZE, generator=g)
    low = -1 if outside else 0
    tokens = torch.randint(low, VOCAB, (rows,), generator=g)
    top_ids = torch.stack([torch.randperm(VOCAB, generator=g)[:TOP] for _ in range(rows)])
    if outside:
        top_ids[torch.rand(top_ids.shape, generator=g) < 0.3] = -1
    return hidden, head, tokens, top_ids, torch.randn(rows, TOP, generator=g).log_softmax(-1) - 0.3


def plain(hidden, head, tokens, top_ids, log_probs, distill):
    """The same loss, row by row."""
    total = hidden.sum() * 0
    for h, token, ids, lps in zip(hidden, tokens, top_ids, log_probs, strict=True):
        logits = (h @ head.T)[None]
        if token >= 0:
            total = total + (1 - distill) * F.cross_entropy(logits, token[None])
        inside = ids >= 0
        if inside.any() and distill:
            soft = torch.zeros(VOCAB).scatter(0, ids[inside], lps[inside].exp())
            total = total + distill * F.cross_entropy(logits, (soft / soft.sum())[None])
    return total


@given(
    st.integers(1, 20),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([1, 3, 7, 64]),
    st.booleans(),
    st.integers(0, 99),
)
def test_value_gradients_and_ranks(rows, distill, chunk, outside, seed):
    hidden, head, *rest = case(rows, outside, seed)
    tensors = [hidden.requires_grad_(), head.requires_grad_()]
    loss, ranks = soft_cross_entropy(hidden, head, *targets(*rest, distill), chunk)
    expected = plain(hidden, head, *rest, distill) + 0 * head.sum()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    found, wanted = (torch.autograd.grad(x * 0.37, tensors) for x in (loss, expected))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    logits, tokens = hidden @ head.T, rest[0]
    inside = tokens >= 0
    expected_ranks = (logits > logits.gather(1, tokens.clamp_min(0)[:, None])).sum(-1)
    assert torch.equal(ranks[inside], expected_ranks[inside])


def test_a_row_with_nothing_in_the_vocabulary_counts_nothing():
    hidden, head, *_ = case(2, False, 0)
    hidden.requires_grad_()
    outside = torch.full((2,), -1), torch.full((2, TOP), -1), torch.zeros(2, TOP)
    loss, _ = soft_cross_entropy(hidden, head, *targets(*outside, 0.5))
    loss.backward()
    assert loss == 0 and not hidden.grad.any()


def test_a_bfloat16_head_sums_in_float32():
    hidden, head, tokens, top_ids, log_probs = case(300, False, 1)
    loss, _ = soft_cross_entropy(hidden, head.bfloat16(), *targets(tokens, top_ids, log_probs, 0.0), 64)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(hidden @ head.T, tokens, reduction="sum"), rtol=2e-2, atol=1.0)


def test_a_trained_head_in_bfloat16():
    hidden, head, *rest = case(20, False, 2)
    (exact,) = torch.autograd.grad(plain(hidden, head.requires_grad_(), *rest, 0.5), [head])
    loss, _ = soft_cross_entropy(hidden, head.bfloat16(), *targets(*rest, 0.5))
    (found,) = torch.autograd.grad(loss, [head])
    assert found.dtype == torch.float32 and (found - exact).norm() < 0.02 * exact.norm()


def test_measuring_takes_no_gradient():
    hidden, head, *rest = case(5, False, 3)
    with torch.no_grad():
        loss, _ = soft_cross_entropy(hidden.requires_grad_(), head.requires_grad_(), *targets(*rest, 0.5))
    assert not loss.requires_grad
