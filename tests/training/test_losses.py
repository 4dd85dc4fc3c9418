"""The fused loss against torch's on full logits, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from longdraft.training.losses import TargetDistribution, soft_cross_entropy

SIZE, VOCAB = 12, 31


def case(rows: int, outside: bool, seed: int, scale: float = 1.0, softcap: float | None = None):
    """hidden, head, labels, weights, target; several rows may share a state of the target."""
    g = torch.Generator().manual_seed(seed)
    hidden, states = (torch.randn(n, SIZE, generator=g) for n in (rows, rows + 3))
    head, its = (torch.randn(VOCAB, SIZE, generator=g) for _ in range(2))
    tokens = torch.randint(-1 if outside else 0, VOCAB, (rows,), generator=g)
    places = torch.randint(0, rows + 3, (rows,), generator=g)
    weights = torch.rand(rows, generator=g) * torch.randint(0, 2, (rows,), generator=g)
    return hidden, head, tokens, weights, TargetDistribution(states, places, its, scale, softcap)


def plain(hidden, head, tokens, weights, target, distill):
    """The same loss, row by row."""
    total = hidden.double().sum() * 0 + head.double().sum() * 0
    for h, token, weight, place in zip(hidden.double(), tokens, weights.double(), target.state_indices, strict=True):
        logits = (h @ head.double().T)[None]
        if token >= 0:
            total = total + weight * (1 - distill) * F.cross_entropy(logits, token[None])
        said = target.states[place].double() @ target.head.double().T * target.scale
        if target.softcap is not None:
            said = target.softcap * torch.tanh(said / target.softcap)
        total = total + weight * distill * F.cross_entropy(logits, said.softmax(-1)[None])
    return total


@given(
    st.integers(1, 20),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([1, 3, 7, 64]),
    st.booleans(),
    st.integers(0, 99),
    st.sampled_from([(1.0, None), (0.3, None), (1.0, 2.0), (2.0, 5.0)]),
)
def test_value_gradients_and_ranks(rows, distill, chunk, outside, seed, logits_are):
    hidden, head, *rest = case(rows, outside, seed, *logits_are)
    tensors = [hidden.requires_grad_(), head.requires_grad_()]
    loss, ranks = soft_cross_entropy(hidden, head, *rest, distill, chunk)
    expected = plain(hidden, head, *rest, distill)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-4)
    found, wanted = (torch.autograd.grad(x * 0.37, tensors) for x in (loss, expected))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    logits, tokens = hidden @ head.T, rest[0]
    inside = tokens >= 0
    expected_ranks = (logits >= logits.gather(1, tokens.clamp_min(0)[:, None])).sum(-1) - 1
    assert torch.equal(ranks[inside], expected_ranks[inside])


@pytest.mark.parametrize("distill", [0.5, 1.0])
def test_a_trained_head_in_bfloat16(distill):
    hidden, head, *rest, target = case(20, False, 2)
    (exact,) = torch.autograd.grad(plain(hidden, head.requires_grad_(), *rest, target, distill), [head])
    rounded = target._replace(head=target.head.bfloat16())
    loss, _ = soft_cross_entropy(hidden, head.bfloat16(), *rest, rounded, distill)
    (found,) = torch.autograd.grad(loss, [head])
    assert found.dtype == torch.float32 and (found - exact).norm() < 0.02 * exact.norm()


def test_ties_and_no_numbers_are_wrong():
    _, head, tokens, *_ = case(6, False, 3)
    for broken in (torch.zeros(6, SIZE), torch.full((6, SIZE), torch.nan)):
        assert soft_cross_entropy(broken, head, tokens)[1].tolist() == [VOCAB - 1] * 6
