"""Formats of a quantized KV cache: what rounding changes, and what it must not change."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longdraft.native.quantized_kv import INT4, Int4KV, Int8KV, entry_bytes
from tests.native.cases import generator, quantized

FORMATS = pytest.mark.parametrize(
    ("dtype", "is_keys"), [(torch.int8, True), (INT4, True), (INT4, False)], ids=["int8", "int4 keys", "int4 values"]
)


def test_numbers_in_int8():
    found = Int8KV.quantize(torch.tensor([[0.0, 0, 0], [1.27, -0.5, 0.004], [3e38, -1, 0]]))
    assert found.quants.tolist() == [[0, 0, 0], [127, -50, 0], [127, 0, 0]]


def test_numbers_in_int4():
    x = torch.zeros(2, 64)
    x[0, [0, 1, 33]] = torch.tensor([-8.0, 7.0, 3.0])
    x[1, [0, 1, 33]] = torch.tensor([8.0, -7.0, 3.4])  # the largest is -8 with a negative scale
    values = Int4KV.quantize(x, is_keys=False).to(torch.float32)
    assert values[:, [0, 1, 33]].tolist() == [[-8.0, 7.0, 3.0], [8.0, -7.0, 3.0]]
    assert int(values.count_nonzero()) == 6


@FORMATS
def test_the_error_is_that_of_the_bits(dtype, is_keys):
    x = torch.randn(50, 128, generator=generator(0))
    error = (quantized(x, dtype, is_keys).to(torch.float32) - x).abs()
    most = x.abs().amax(-1, keepdim=True)
    eight_bits = torch.ones(128, dtype=torch.bool) if dtype == torch.int8 else torch.zeros(128, dtype=torch.bool)
    if is_keys and dtype == INT4:
        eight_bits[48:64] = eight_bits[112:] = True
    assert bool((error <= most / torch.where(eight_bits, 120, 7.9)).all())
    if dtype == INT4:
        assert float(error[:, ~eight_bits].mean()) > 0.03


def test_large_slow_numbers_of_a_key_do_not_coarsen_the_others():
    """Where scales of 32 dimensions side by side fail: a key whose slowest pairs are a hundred times as large."""
    x = torch.randn(50, 128, generator=generator(1))
    x[:, 50:64] *= 100
    found = Int4KV.quantize(x, is_keys=True).to(torch.float32)
    small = [*range(48), *range(64, 112)]
    assert float((found - x)[:, small].norm() / x[:, small].norm()) < 0.12
    assert float((found - x).norm() / x.norm()) < 0.02


@FORMATS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [3, 60, 127])
def test_a_number_that_is_not_finite_is_not_lost(dtype, is_keys, bad, at):
    x = torch.ones(2, 128)
    x[0, at] = bad
    found = quantized(x, dtype, is_keys).to(torch.float32)
    assert not found[0, at].isfinite() and found[1].isfinite().all()


@given(st.sampled_from([16, 48, 64, 80, 128, 256]), st.booleans(), st.integers(0, 999), st.floats(-44, 30))
def test_a_dequantized_entry_in_int4_is_quantized_to_the_same_bytes(d, is_keys, seed, exponent):
    """As a prompt cache does, whose entries are floats."""
    g = generator(seed)
    x = torch.randn(9, d, generator=g) * 10**exponent * torch.rand(9, 1, generator=g)
    x[0], x[1, ::2] = 0, 0
    once = quantized(x, INT4, is_keys).to(torch.float32)
    assert once.isfinite().all() and torch.equal(quantized(once, INT4, is_keys).to(torch.float32), once)


@pytest.mark.parametrize("d", [16, 64, 128, 256])
def test_bytes_of_an_entry(d):
    x = torch.zeros(1, d)
    parts = {
        torch.int8: [y for kv in (Int8KV.quantize(x),) * 2 for y in (kv.quants, kv.scales)],
        INT4: [Int4KV.quantize(x, is_keys).data for is_keys in (True, False)],
        torch.bfloat16: [x.bfloat16()] * 2,
    }
    for dtype, tensors in parts.items():
        assert entry_bytes(dtype, d) == sum(y.nbytes for y in tensors)
    if d >= 128:
        assert entry_bytes(INT4, d) < 0.63 * entry_bytes(torch.int8, d) < 0.33 * entry_bytes(torch.bfloat16, d)


def test_entries_in_int4_are_indexed_as_a_whole():
    kv = Int4KV.quantize(torch.randn(2, 3, 8, 64), is_keys=True)
    assert torch.equal(kv[:, 1:, 2:5, :].to(torch.float32), kv.to(torch.float32)[:, 1:, 2:5])
    with pytest.raises(IndexError, match="whole"):
        kv[:, :, :, :32]
