"""The reference against torch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from longdraft.attention import reference
from longdraft.attention.reference import partial_attention
from tests.attention.cases import case


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_the_reference_is_attention_under_an_explicit_mask(tree):
    q, keys, values, batch, scale = case([0, 5, 13], 6, tree=tree)
    got = reference.attend(q, keys, values, batch, scale)
    for b, (slot, n) in enumerate(zip(batch.slots, batch.prefix_lens, strict=True)):
        token_mask = batch.mask[b] if tree else torch.ones(6, 6, dtype=torch.bool).tril()
        mask = torch.cat([torch.ones(6, n, dtype=torch.bool), token_mask], dim=1)
        k, v = (t[slot, :, : n + 6].repeat_interleave(3, dim=0) for t in (keys, values))
        expected = F.scaled_dot_product_attention(q[b], k, v, attn_mask=mask, scale=scale)
        torch.testing.assert_close(got[b], expected, atol=2e-6, rtol=2e-6)


def test_partial_attention_returns_the_log_sum_exp_of_the_scores():
    q, k, v = torch.randn(4, 3, 8), torch.randn(2, 7, 8), torch.randn(2, 7, 8)
    _, lse = partial_attention(q, k, v, 0.5)
    scores = 0.5 * torch.einsum("htd,hnd->htn", q.double(), k.double().repeat_interleave(2, 0))
    torch.testing.assert_close(lse.double(), scores.exp().sum(-1).log(), atol=1e-5, rtol=1e-5)


def test_fully_masked_queries_give_zero_and_minus_infinity():
    mask = torch.tensor([[True, False], [False, False]])
    o, lse = partial_attention(torch.randn(1, 2, 4), torch.randn(1, 2, 4), torch.randn(1, 2, 4), 1.0, mask)
    assert torch.equal(o[0, 1], torch.zeros(4)) and lse[0, 1] == -math.inf
    assert torch.isfinite(o[0, 0]).all() and torch.isfinite(lse[0, 0])
    o, lse = partial_attention(torch.randn(2, 3, 4), torch.randn(1, 0, 4), torch.randn(1, 0, 4), 1.0)
    assert torch.equal(o, torch.zeros(2, 3, 4)) and (lse == -math.inf).all()
