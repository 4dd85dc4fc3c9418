"""Keys and values in eight bits: the Triton kernels against the definition, and which path is taken."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from longdraft.attention import dispatch, reference, scaled, triton_backend
from longdraft.errors import CapabilityError
from longdraft.native.scaled import Scaled
from tests.attention.cases import TOLERANCE, case, scored

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []  # one is to be seen with `-m gpu` alone
CLOSE = TOLERANCE | {torch.float32: 1e-5}
DTYPES = torch.float32, torch.bfloat16, torch.float16


def rounded(lengths, size, device, **options):
    """A case whose keys and values are in eight bits; rows that nobody may see are no numbers."""
    q, keys, values, *rest = case(lengths, size, device=device, **options)
    return q, Scaled.of(keys), Scaled.of(values), *rest


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    tolerance = CLOSE[found.dtype]
    torch.testing.assert_close(found.cpu(), expected, atol=tolerance, rtol=tolerance)


@settings(max_examples=6)
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=2),
    size=st.integers(1, 12),
    heads=st.sampled_from([(2, 2), (4, 2), (5, 1)]),
    head_dim=st.integers(1, 48),
    dtype=st.sampled_from(DTYPES),
    tree=st.booleans(),
    behind=st.sampled_from([0, 7]),
    scoring=st.sampled_from([(None, False), (20.0, True)]),
)
def test_any_shape_of_a_ragged_batch(lengths, size, heads, head_dim, dtype, tree, behind, scoring):
    """The kernels, and what a CPU computes: the definition."""
    shape = {"heads": heads, "head_dim": head_dim, "dtype": dtype, "tree": tree, "behind": behind}
    own, there = rounded(lengths, size, "cpu", **shape), rounded(lengths, size, DEVICE, **shape)
    cap, sinks = scoring
    expected = scaled.or_scaled(reference.attend)(*own, scored(cap, sinks, heads[0]))
    close(triton_backend.attend(*there, scored(cap, sinks, heads[0], DEVICE)), expected)
    q, keys, values, block, scale = there
    found = triton_backend.attend_prefix(q, keys, values, block, scale)
    close(found, scaled.prefix_or_scaled(reference.attend)(*own))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_bits_are_those_of_rows_that_were_unpacked_before(dtype, monkeypatch):
    """So the kernels change nothing but where the rows are multiplied. A GPU's matrix units take rows that were just
    unpacked by another way, which adds up in another order."""
    q, keys, values, block, scale = rounded([100, 0, 65], 5, DEVICE, heads=(6, 2), head_dim=32, dtype=dtype)
    monkeypatch.setattr(triton_backend, "MAX_TILE_ROWS", 16)  # tiles of one size
    monkeypatch.setattr(triton_backend, "_choose_splits", lambda *_: 3)
    found = triton_backend.attend_prefix(q, keys, values, block, scale)
    unpacked = triton_backend.attend_prefix(q, keys.to(dtype), values.to(dtype), block, scale)
    assert float((found - unpacked).abs().max()) <= (CLOSE[dtype] if DEVICE == "cuda" else 0)


def test_other_rows_take_the_path_that_they_took():
    q, keys, values, block, scale = case([20, 3], 4)
    either, prefix = scaled.or_scaled(reference.attend), scaled.prefix_or_scaled(lambda q, *_: 2 * q)
    assert torch.equal(either(q, keys, values, block, scale), reference.attend(q, keys, values, block, scale))
    assert torch.equal(prefix(q, keys, values, block, scale), 2 * q)
    small = Scaled.of(keys), Scaled.of(values)
    assert not torch.equal(either(q, *small, block, scale), either(q, keys, values, block, scale))
    assert not torch.equal(prefix(q, *small, block, scale), 2 * q)


@pytest.mark.parametrize(
    ("device", "dtype", "forced", "reason"),
    [
        ("cuda", torch.bfloat16, None, None),
        ("cuda", torch.bfloat16, "triton", None),
        ("cuda", torch.bfloat16, "hybrid", "LONGDRAFT_ATTENTION=hybrid"),
        ("cuda", torch.float64, None, "float64"),
        ("cpu", torch.float32, None, "on a GPU"),
    ],
)
def test_who_reads_eight_bits(device, dtype, forced, reason, monkeypatch):
    monkeypatch.delenv(dispatch.ENVIRONMENT, raising=False)
    if forced:
        monkeypatch.setenv(dispatch.ENVIRONMENT, forced)
    found = dispatch.scaled_unavailable(torch.device(device), dtype, 128)
    assert found is None if reason is None else reason in found


def test_kernels_that_do_not_give_what_the_definition_gives_are_not_taken(monkeypatch):
    scaled.check.cache_clear()
    scaled.check(torch.device("cpu"), torch.float32, 16)
    for wrong, says in ((lambda *_: torch.zeros(()), "differ"), (lambda *_: 1 / 0, "division by zero")):
        monkeypatch.setattr(scaled, "scaled_attention", wrong)
        scaled.check.cache_clear()
        with pytest.raises(CapabilityError, match=says):
            scaled.check(torch.device("cpu"), torch.float32, 16)
