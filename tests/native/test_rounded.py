"""Rounded weights: numbers, and products within the errors of rounding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft.native import build
from longdraft.native import nibbled as in_four_bits
from longdraft.native import rounded as in_eight_bits
from longdraft.native.dequantise import FORMATS
from longdraft.native.library import kernels_for
from longdraft.native.nibbled import nibbled
from longdraft.native.rounded import rounded
from longdraft.native.stored import Stored
from tests.native.levels import LEVELS, kernels_of


def test_weights_are_rounded_to_the_nearest():
    w = torch.randn(5000, 70, generator=torch.Generator().manual_seed(0))  # more rows than are rounded at a time
    w[7] = 0
    got = rounded(w)
    scales = w.abs().amax(1, keepdim=True) / 127
    assert got.shape == (5000, 70) and got.data.shape == (313, 16 * (72 + 4))
    assert bool(((got.floats() - w).abs() <= 0.5001 * scales).all())
    bands = got.data[:, : 16 * 72].reshape(313, 36, 16, 2)
    assert torch.equal(bands[2, 17, 5, 1], (w[37, 35] / scales[37, 0]).round().to(torch.int8))
    assert not bool(bands[:, 35:].any())
    with pytest.raises(ValueError, match="at most 16384"):
        rounded(torch.ones(1, 16385))


@pytest.mark.parametrize("convert", [rounded, nibbled])
@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 20), outs=st.integers(1, 120), size=st.integers(1, 200), seed=st.integers(0, 99))
def test_products(kernels, convert, rows, outs, size, seed):
    generator = torch.Generator().manual_seed(seed)
    x, w, bias = (torch.randn(shape, generator=generator) for shape in ((rows, size), (outs, size), (outs,)))
    x[0] *= 1e-30
    w = convert(w)
    with_bias, plain = kernels.linear(x, [(w, bias), (w, None)])
    expected = x.double() @ w.floats().double().T
    # Each number of x is off by half a step at most.
    bound = (0.5001 * x.abs().amax(1)[:, None] / 4095 * w.floats().abs().sum(1)).double()
    bound += 1e-5 if convert is rounded else 1e-4
    assert bool(((plain - expected).abs() <= bound).all())
    assert bool(((with_bias - bias - expected).abs() <= bound).all())
    narrowest = kernels_for(build.levels()[-1]).linear(x, [(w, bias), (w, None)])
    assert all(map(torch.equal, (with_bias, plain), narrowest))
    alone = torch.cat([kernels.linear(row[None], [(w, bias)])[0] for row in x])
    assert torch.equal(with_bias, alone)


@pytest.mark.parametrize("size", [4128, 4132, 16384])  # numbers of thirteen bits up to the first one
def test_long_rows_do_not_overflow(kernels, size):
    x, w = torch.full((1, size), 3.0), rounded(torch.full((2, size), -2.0))
    got = kernels.linear(x, [(w, None)])[0]
    torch.testing.assert_close(got, torch.full((1, 2), -6.0 * size))


@pytest.mark.parametrize("convert", [rounded, nibbled])
def test_a_row_that_is_not_finite_gives_nan_and_harms_no_other_row(kernels, convert):
    x = torch.ones(3, 64)
    x[0, 3], x[1, 5] = float("inf"), float("nan")
    output = kernels.linear(x, [(convert(torch.ones(4, 64)), None)])[0]
    assert bool(output[:2].isnan().all())
    torch.testing.assert_close(output[2], torch.full((4,), 64.0))


def test_four_bits_are_within_half_a_step_of_each_block():
    w = torch.randn(5000, 70, generator=torch.Generator().manual_seed(0))
    w[7], w[9, 32:64] = 0, 0.25
    got = nibbled(w)
    assert got.shape == (5000, 70) and got.data.shape == (313, 3 * 320)
    blocks = torch.nn.functional.pad(w, (0, 26)).unflatten(1, (3, 32))
    low, high = blocks.amin(2), blocks.amax(2)
    # What stands for 0 and a step are rounded to eight bits themselves.
    bound = (high - low) / 30 + 0.005 * (low.abs() + high.abs()) + 1e-6
    assert bool(((got.floats() - w).abs() <= bound.repeat_interleave(32, 1)[:, :70]).all())
    assert not bool(got.floats()[7].any()) and torch.equal(got.floats()[9, 32:64], w[9, 32:64])


@settings(max_examples=15, deadline=None)
@given(
    outs=st.integers(1, 90),
    size=st.integers(1, 200),
    size_of=st.sampled_from([1e-30, 1.0, 1e20]),
    seed=st.integers(0, 99),
)
def test_the_kernel_makes_the_same_four_bits(kernels, outs, size, size_of, seed):
    w = size_of * torch.randn(outs, size, generator=torch.Generator().manual_seed(seed))
    w[0] = w[-1, 0]
    assert torch.equal(kernels.nibbled(w).data, nibbled(w).data)
    assert torch.equal(kernels.nibbled(w.bfloat16()).data, nibbled(w.bfloat16()).data)


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
def test_four_bits_of_stored_weights(name, monkeypatch):
    monkeypatch.setattr(in_four_bits, "TOGETHER", 32)
    monkeypatch.setattr(in_eight_bits, "TOGETHER", 32)
    weights, size = FORMATS[name][:2]
    data = torch.randint(0, 60, (70, 2 * 256 // weights * size), dtype=torch.uint8)
    w = Stored(data, name)
    assert torch.equal(kernels_of(LEVELS[-1]).nibbled(w).data, nibbled(w).data)
