"""Weights as they are stored: the numbers of gguf's own dequantisation, and products to the bit of unpacked ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft.native.dequantise import FORMATS
from longdraft.native.stored import HALVES, Stored

gguf = pytest.importorskip("gguf")


# Where in a block of each kind halves lie: scales and least values.
SCALES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
}
# MXFP4's scale is a byte, the exponent of a power of two.
EXPONENTS = {"MXFP4": 0}


def stored(kind: str, outs: int, size: int, seed: int = 0) -> Stored:
    """Random bytes, with scales that are numbers of a moderate size."""
    weights, length, _ = FORMATS[kind]
    rng = np.random.default_rng(seed)
    if kind in HALVES:
        data = rng.standard_normal((outs, size)).astype(np.float16)
        if kind == "BF16":
            return Stored(torch.from_numpy(data).bfloat16().view(torch.uint8), kind)
        return Stored(torch.from_numpy(data).view(torch.uint8), kind)
    data = rng.integers(0, 256, (outs, size // weights, length), dtype=np.uint8)
    for at in SCALES.get(kind, ()):
        data[..., at : at + 2] = rng.standard_normal((outs, size // weights, 1)).astype(np.float16).view(np.uint8)
    if (at := EXPONENTS.get(kind)) is not None:
        data[..., at] = rng.integers(118, 130, (outs, size // weights), dtype=np.uint8)
    return Stored(torch.from_numpy(data.reshape(outs, -1)), kind)


def expected(w: Stored) -> torch.Tensor:
    kind = gguf.GGMLQuantizationType[w.format]
    return torch.from_numpy(gguf.dequantize(w.data.numpy(), kind).reshape(w.shape).astype(np.float32))


@pytest.mark.parametrize("kind", FORMATS)
def test_the_numbers_are_those_of_ggufs_dequantisation(kernels, kind):
    for seed in range(5):
        w = stored(kind, 7, 512, seed)
        assert torch.equal(kernels.unpack(w), expected(w))
        assert torch.equal(w.floats(), expected(w))


@pytest.mark.parametrize("kind", FORMATS)
@settings(max_examples=3, deadline=None)
@given(rows=st.integers(1, 20), outs=st.integers(1, 60), blocks=st.integers(1, 3), seed=st.integers(0, 99))
def test_products_are_those_of_the_unpacked_weights_to_the_bit(kernels, kind, rows, outs, blocks, seed):
    w = stored(kind, outs, blocks * 256, seed)
    generator = torch.Generator().manual_seed(seed)
    x, bias = (torch.randn(n, generator=generator) for n in ((rows, blocks * 256), (outs,)))
    got, want = (kernels.linear(x, [(m, bias)])[0] for m in (w, kernels.unpack(w)))
    assert torch.equal(got, want)
    alone = torch.cat([kernels.linear(row[None], [(w, bias)])[0] for row in x])
    assert torch.equal(got, alone)


@pytest.mark.parametrize("kind", FORMATS)
def test_half_precision_of_every_size(kernels, kind):
    """Scales that are tiny, large, negative or zero; of the halves themselves infinity and NaN too."""
    if kind in HALVES:
        dtype = torch.bfloat16 if kind == "BF16" else torch.float16
        bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        w = Stored(bits.view(256, 256).view(torch.uint8), kind)
        got, want = kernels.unpack(w), bits.view(256, 256).float()
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(7), want.nan_to_num(7))
        return
    w = stored(kind, 4, 256)
    for row, (scale, exponent) in enumerate(((6e-8, 0), (65504.0, 250), (-3e-5, 1), (0.0, 2))):
        if kind in EXPONENTS:
            w.data[row, EXPONENTS[kind]] = exponent
        else:
            at = SCALES[kind][0]
            w.data[row, at : at + 2] = torch.tensor([scale], dtype=torch.float16).view(torch.uint8)
    assert torch.equal(w.floats(), expected(w))
    assert torch.equal(kernels.unpack(w), expected(w))


def test_what_is_no_stored_matrix_is_refused():
    with pytest.raises(ValueError, match=r"Q4_1, Q8_0.*got TQ1_0"):
        Stored(torch.zeros(2, 20, dtype=torch.uint8), "TQ1_0")
    with pytest.raises(ValueError, match="whole number of Q4_1"):
        Stored(torch.zeros(2, 21, dtype=torch.uint8), "Q4_1")
    with pytest.raises(ValueError, match="rows of bytes"):
        Stored(torch.zeros(2, 20), "Q4_1")
