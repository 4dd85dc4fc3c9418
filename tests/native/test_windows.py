"""Attention whose rows see their path from a rank of their own on, with capped scores and with sinks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longdraft import native
from tests.native.levels import LEVELS
from tests.native.test_bits import PREFIXES, keys_and_values, random_tree

pytestmark = pytest.mark.skipif(not LEVELS, reason=f"no kernels here: {native.missing()}")

WINDOWS = st.one_of(st.integers(1, 40), st.sampled_from([127, 128, 129, 511, 512, 513]), st.integers(200, 2000))
# Query heads of each of two KV heads.
GROUPS = st.integers(1, 3)


def scoring(softcap: float | None, sinks: bool, heads: int, seed: int) -> dict[str, object]:
    found = 2 * torch.randn(heads, generator=torch.Generator().manual_seed(seed)) if sinks else None
    return {"softcap": softcap, "sinks": found}


def expected(q, k, v, seen, scale, softcap=None, sinks=None):
    """q (Hq, T, d), seen (T, n), in float64."""
    group = q.shape[0] // k.shape[0]
    k, v = (x.double().repeat_interleave(group, 0) for x in (k, v))
    scores = q.double() @ k.transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, q.shape[1], 1)], -1)
    return (scores.softmax(-1)[..., : k.shape[1]] @ v).float()


@settings(max_examples=15)
@given(
    prefix=PREFIXES,
    size=st.one_of(st.integers(1, 12), st.integers(120, 150)),
    deep=st.sampled_from([0.5, 0.95, 1.0]),
    window=WINDOWS,
    group=GROUPS,
    transposed=st.booleans(),
    softcap=st.sampled_from([None, 0.5, 30.0]),
    sinks=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 999),
)
@example(600, 150, 1.0, 100, 2, True, None, False, 2, 0)  # the window slides over the prefix's end in the tree
@example(1100, 5, 0.5, 20, 1, False, 30.0, True, 1, 1)
def test_rows_of_a_tree(kernels, prefix, size, deep, window, group, transposed, softcap, sinks, threads, seed):
    """Against torch; and to the bit what a row gets alone, whose window may begin later than all others'."""
    d, more = 32, scoring(softcap, sinks, 2 * group, seed)
    _, mask = random_tree(size, seed, deep)
    k, v = keys_and_values(2, prefix + size, d, transposed, seed)
    q = 3 * torch.randn(2 * group, size, d, generator=torch.Generator().manual_seed(seed + 1))
    begins = (prefix + mask.sum(1) - window).clamp(min=0).int()
    torch.set_num_threads(threads)
    found = kernels.attend(q.view(2, group * size, d), k, v, mask, 0.2, begins=begins, **more).view(q.shape)
    torch.set_num_threads(1)
    seen = torch.cat([torch.ones(size, prefix, dtype=torch.bool), mask], 1)
    seen &= seen.cumsum(1) > begins[:, None]
    torch.testing.assert_close(found, expected(q, k, v, seen, 0.2, **more), rtol=2e-5, atol=2e-5)
    for node in {0, 1 % size, size // 2, size - 1}:
        rows = torch.cat([torch.arange(prefix), prefix + mask[node].nonzero()[:, 0]])
        own = q[:, node].reshape(2, group, d), *(x[:, rows] for x in (k, v))
        alone = kernels.attend(*own, None, 0.2, begins=begins[node : node + 1], **more)
        assert torch.equal(found[:, node], alone.view(-1, d))


@settings(max_examples=15)
@given(
    before=PREFIXES,
    rows=st.one_of(st.integers(1, 20), st.integers(90, 210), st.integers(600, 700)),
    window=WINDOWS,
    group=GROUPS,
    transposed=st.booleans(),
    softcap=st.sampled_from([None, 0.5, 30.0]),
    sinks=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 999),
)
def test_a_piece_of_a_prompt(kernels, before, rows, window, group, transposed, softcap, sinks, threads, seed):
    more, n = scoring(softcap, sinks, 2 * group, seed), before + rows
    k, v = keys_and_values(2, n, 32, transposed, seed)
    q = 3 * torch.randn(2 * group, rows, 32, generator=torch.Generator().manual_seed(seed + 1))
    begins = (torch.arange(before + 1, n + 1) - window).clamp(min=0).int()
    torch.set_num_threads(threads)
    found = kernels.attend_chunk(q, k, v, 0.2, begins=begins, **more)
    places = torch.arange(n)
    seen = (places >= begins[:, None]) & (places <= torch.arange(before, n)[:, None])
    torch.testing.assert_close(found, expected(q, k, v, seen, 0.2, **more), rtol=2e-5, atol=2e-5)
    for row in {0, rows // 2, rows - 1}:
        own = q[:, row].reshape(2, group, 32), *(x[:, : before + row + 1] for x in (k, v))
        alone = kernels.attend(*own, None, 0.2, begins=begins[row : row + 1], **more)
        assert torch.equal(found[:, row], alone.view(-1, 32))


def test_whole_segments_of_a_text_may_be_missing(kernels):
    """A sliding buffer: a row's bits stay when segments of 512 keys that it does not see are left out before it."""
    k, v = keys_and_values(2, 2000, 16, True, 0)
    q = 3 * torch.randn(2, 3, 16)
    begins = torch.tensor([1600, 1601, 1650], dtype=torch.int32)
    found = kernels.attend(q, k, v, None, 0.2, begins=begins)
    for missing in (512, 1536):
        rest = kernels.attend(q, k[:, missing:], v[:, missing:], None, 0.2, begins=begins - missing)
        assert torch.equal(rest, found)


def test_keys_that_no_row_sees_are_not_read(kernels):
    k, v = keys_and_values(2, 700, 16, True, 0)
    q, tree = torch.randn(2, 3, 16), torch.ones(3, 3, dtype=torch.bool).tril()
    for begin in (1, 130, 515, 690, 698):
        begins = torch.tensor([begin, begin + 1, begin], dtype=torch.int32).clamp(max=697)
        found = kernels.attend(q, k, v, tree, 0.2, begins=begins)
        assert found.isfinite().all()
        chunk = kernels.attend_chunk(q, k, v, 0.2, begins=begins)
        assert torch.equal(chunk, found)
        k[:, : min(begin, 697)], v[:, : min(begin, 697)] = math.nan, math.nan
        assert torch.equal(kernels.attend(q, k, v, tree, 0.2, begins=begins), found)
        assert torch.equal(kernels.attend_chunk(q, k, v, 0.2, begins=begins), found)


@pytest.mark.parametrize("sink", [-math.inf, -200.0, 0.0, 90.0, 1e4])
def test_sinks_of_any_size(kernels, sink):
    k, v = keys_and_values(1, 300, 16, True, 0)
    q, sinks = torch.randn(2, 1, 16), torch.tensor([sink, 0.0])
    found = kernels.attend(q.view(1, 2, 16), k, v, None, 0.2, sinks=sinks).view(q.shape)
    seen = torch.ones(1, 300, dtype=torch.bool)
    torch.testing.assert_close(found, expected(q, k, v, seen, 0.2, sinks=sinks), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("cap", [0.01, 1.0, 50.0])
def test_capped_scores_of_any_size(kernels, cap):
    """Scores far below the cap, and far above it; NaN is not lost."""
    size = torch.logspace(-6, 6, 40).repeat_interleave(2)
    k = torch.zeros(1, 80, 16)
    k[0, :, 0] = size * torch.tensor([1.0, -1.0]).repeat(40)
    v, q, seen = torch.randn(1, 80, 16), torch.ones(1, 1, 16), torch.ones(1, 80, dtype=torch.bool)
    found = kernels.attend(q, k, v, None, cap, softcap=cap)
    torch.testing.assert_close(found, expected(q, k, v, seen, cap, softcap=cap), rtol=2e-5, atol=2e-5)
    k[0, 70] = math.nan
    assert kernels.attend(q, k, v, None, cap, softcap=cap).isnan().all()
