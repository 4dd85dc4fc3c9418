"""Every attention path equals the reference, for tree attention and prefix attention."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longdraft.attention import dispatch, prefix
from tests.attention.cases import HEADS, TOLERANCE, assert_like_reference, case, make_modifiers
from tests.support import torch_kernels

PATHS = ["cpu", "cpu without kernels", "sdpa", "hybrid"]
# Texts that end around the length from which a CPU takes one product a head, and blocks around that of a few rows.
LENGTHS = st.lists(st.one_of(st.integers(0, 130), st.integers(1015, 1030)), min_size=1, max_size=2)
SIZES = st.one_of(st.integers(1, 12), st.integers(60, 70), st.integers(94, 100))


@pytest.fixture(params=PATHS, scope="module")
def path(request):
    """The name of a path that can run here."""
    name, _, without = request.param.partition(" ")
    with pytest.MonkeyPatch.context() as patch, torch_kernels.registered():
        patch.setenv("LONGDRAFT_NATIVE", "0" if without else "1")
        yield name


@settings(max_examples=30)
@given(
    lengths=LENGTHS,
    size=SIZES,
    heads=st.sampled_from(HEADS),
    head_dim=st.sampled_from([1, 5, 8, 16, 33, 64, 80, 100, 256]),
    dtype=st.sampled_from(list(TOLERANCE)),
    tree=st.booleans(),
    transposed=st.booleans(),
    behind=st.sampled_from([0, 0, 1, 9, 30, 65]),
    window=st.sampled_from([None, None, 1, 3, 20, 64, 100]),
    softcap=st.sampled_from([None, None, 2.0, 30.0]),
    sinks=st.booleans(),
    seed=st.integers(0, 99),
)
@example([11, 0, 130, 1], 7, (6, 2), 16, torch.float32, True, True, 0, None, None, False, 0)
@example([9], 200, (8, 1), 16, torch.float32, True, False, 0, None, None, False, 0)
@example([1018], 97, (6, 2), 64, torch.float32, False, False, 6, None, None, False, 0)
@example([90], 100, (6, 2), 16, torch.bfloat16, False, False, 0, 64, 5.0, True, 0)
def test_any_shape(path, lengths, size, heads, head_dim, dtype, tree, transposed, behind, window, softcap, sinks, seed):
    """Ragged batches in shuffled slots; all other entries are NaN and stay so."""
    if path == "hybrid":
        head_dim, transposed = max(8, head_dim // 8 * 8), False
    elif dtype == torch.float16:
        dtype = torch.bfloat16
    q, keys, values, batch, scale = case(
        lengths, size, heads=heads, head_dim=head_dim, tree=tree, transposed=transposed, dtype=dtype, behind=behind,
        window=window, seed=seed,
    )  # fmt: skip
    before = keys.nan_to_num(9), values.nan_to_num(9)
    attend = dispatch.PATHS[path]
    close = max(5e-6, TOLERANCE[dtype])
    assert_like_reference(attend, q, keys, values, batch, scale, make_modifiers(softcap, sinks, heads[0]), close)
    assert torch.equal(keys.nan_to_num(9), before[0]) and torch.equal(values.nan_to_num(9), before[1])


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    size=st.integers(1, 16),
    heads=st.sampled_from(HEADS[:3]),
    dtype=st.sampled_from(list(TOLERANCE)),
    transposed=st.booleans(),
)
def test_prefix_attention(path, lengths, size, heads, dtype, transposed):
    if path == "hybrid":
        transposed = False
    elif dtype == torch.float16:
        dtype = torch.bfloat16
    q, keys, values, batch, scale = case(lengths, size, heads=heads, tree=False, transposed=transposed, dtype=dtype)
    for slot, n in zip(batch.slots, batch.prefix_lens, strict=True):
        keys[slot, :, n:], values[slot, :, n:] = math.nan, math.nan
    found, expected = (
        prefix.make_prefix_attention(dispatch.PATHS[p])(q, keys, values, batch, scale) for p in (path, "reference")
    )
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
