"""The training-time test's attention against full masks, forward and backward."""

from __future__ import annotations

import pytest
import torch

from longdraft.training import drafted_attention
from longdraft.training.drafted_attention import drafted
from tests.training.helpers import masked_attention

HQ, HKV, DIM = 6, 2, 8


def plain(q, k, v, later, window):
    """Row by row: the keys that a row sees, laid out one after the other."""
    rows, queries = k.shape[1], q.shape[1]
    shift = 0 if later is None else later[0].shape[2]
    out = []
    for j in range(queries):
        at = rows - queries + j
        low = 0 if window is None else max(0, at - window + 1)
        seen = [x[:, low : at - shift + 1] for x in (k, v)]
        if later is not None:
            seen = [torch.cat([s, x[:, j]], 1) for s, x in zip(seen, later, strict=True)]
        out.append(masked_attention(q[:, j : j + 1], *seen, torch.ones(1, seen[0].shape[1], dtype=torch.bool)))
    return torch.cat(out, 1)


@pytest.mark.parametrize("block", [5, 256])
@pytest.mark.parametrize("window", [None, 7, 40])
@pytest.mark.parametrize(("rows", "queries", "shift"), [(23, 23, 0), (30, 12, 0), (23, 20, 3), (30, 9, 5), (6, 1, 5)])
def test_forward_and_backward(rows, queries, shift, window, block, monkeypatch):
    monkeypatch.setattr(drafted_attention, "BLOCK", block)
    monkeypatch.setattr(drafted_attention, "WEIGHTS", 1)  # as small as blocks get
    g = torch.Generator().manual_seed(rows + shift)

    def made(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=g, dtype=torch.float64).float().requires_grad_()

    q, k, v = made(HQ, queries, DIM), made(HKV, rows, DIM), made(HKV, rows, DIM)
    later = (made(HKV, queries, shift, DIM), made(HKV, queries, shift, DIM)) if shift else None
    inputs = [q, k, v, *(later or ())]
    direction = torch.randn(HQ, queries, DIM, generator=g)
    found = []
    for attention in (drafted, plain):
        out = attention(q, k, v, later, window)
        found.append([out, *torch.autograd.grad((out * direction).sum(), inputs)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_bfloat16_is_close():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 40, DIM, generator=g) for n in (HQ, HKV, HKV))
    half = drafted(*(x.bfloat16() for x in (q, k, v)), None, 16)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), drafted(q, k, v, None, 16), rtol=0.05, atol=0.05)


def test_what_cannot_be():
    q, k = torch.zeros(HQ, 5, DIM), torch.zeros(HKV, 6, DIM)
    later = torch.zeros(HKV, 5, 2, DIM)
    with pytest.raises(ValueError, match="too few"):
        drafted(q, k, k, (later, later))
    with pytest.raises(ValueError, match="window of 2"):
        drafted(q[:, :4], k, k, (later[:, :4], later[:, :4]), 2)
