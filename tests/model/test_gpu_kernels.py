"""The kernels of a layer's parts against their definitions, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from longdraft.model.gpu import kernels as gpu_kernels
from longdraft.model.gpu import operators as gpu_operators
from tests.support.slow_marks import rotate_pairs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []  # one is to be seen with `-m gpu` alone
DTYPES = torch.float32, torch.bfloat16, torch.float16
dtypes = st.sampled_from(DTYPES)


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def assert_same(found, expected) -> None:
    """Equal but for the order of sums: in 16 bits a number in a hundred may be rounded the other way."""
    if isinstance(expected, tuple):
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b)
        return
    assert found.dtype == expected.dtype and found.shape == expected.shape
    if expected.dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
        return
    step = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(found, expected, rtol=2 * step, atol=step)
    assert (found != expected).float().mean() <= 0.01


@settings(max_examples=15)
@given(dtypes, st.integers(1, 3), st.sampled_from([1, 7, 48, 128, 300]))
def test_norms(dtype, rows, size):
    x, delta = numbers(2, rows, size, dtype=dtype), numbers(2, rows, size, dtype=dtype, seed=1)
    weight = numbers(size, dtype=dtype, seed=2)
    assert_same(gpu_kernels.rms_norm(x, weight, 1e-5), gpu_operators.rms_norm(x, weight, 1e-5))
    arguments = x, delta, weight, 1e-6
    assert_same(gpu_kernels.add_rms_norm(*arguments), gpu_operators.add_rms_norm(*arguments))


@settings(max_examples=15)
@given(dtypes, st.integers(1, 3), st.sampled_from([1, 30, 1500]), st.booleans())
def test_silu_times(dtype, rows, size, together):
    both = numbers(2, rows, 2 * size, dtype=dtype)
    gate, up = both.split(size, dim=-1)  # parts of one product
    if not together:
        gate, up = gate.contiguous(), up.contiguous()
    assert_same(gpu_kernels.silu_and_mul(3 * gate, up), gpu_operators.silu_and_mul(3 * gate, up))
    assert_same(gpu_kernels.silu_and_mul(gate, up), gpu_operators.silu_and_mul(gate, up))


def of_rope(dtype, heads, kv_heads, d, rotary, size, normed, transposed, offset, together=True):
    """Arguments of rope_and_write_kv; keys and values are the store's, with other rows around."""
    widths = [heads * d, kv_heads * d, kv_heads * d]
    parts = numbers(2, size, sum(widths), dtype=dtype).split(widths, dim=-1)
    if not together:
        parts = [x.contiguous() for x in parts]
    angles = numbers(2, size, rotary, dtype=torch.float32, seed=3)
    weights = [numbers(d, dtype=dtype, seed=s) for s in (4, 5)] if normed else [None, None]
    keys, values = (numbers(3, kv_heads, 20, d, dtype=dtype, seed=s) for s in (6, 7))
    if transposed:
        keys = keys.transpose(2, 3).contiguous().transpose(2, 3)
    places = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([2, 0], [9, 0])]
    return [*parts, angles.cos().to(dtype), angles.sin().to(dtype), *weights, 1e-6, keys, values, *places, offset]


# Heads, head size, rotated numbers of it, rows, normed, transposed, offset, together.
ROPES = [
    ((6, 2), 16, 16, 4, False, False, 0, True),
    ((4, 4), 24, 24, 3, True, False, 5, True),
    ((4, 1), 16, 8, 2, False, True, 1, False),
    ((2, 1), 20, 0, 1, True, False, 0, True),
]


@pytest.mark.parametrize(("case", "dtype"), rotate_pairs(ROPES, DTYPES))
def test_rope_write(case, dtype):
    heads, d, rotary, size, normed, transposed, offset, together = case
    found, expected = [], []
    for results, function in ((found, gpu_kernels.rope_and_write_kv), (expected, gpu_operators.rope_and_write_kv)):
        arguments = of_rope(dtype, *heads, d, rotary, size, normed, transposed, offset, together)
        results += [function(*arguments), *arguments[8:10]]
    untouched = of_rope(dtype, *heads, d, rotary, size, normed, transposed, offset)[8]
    assert_same(tuple(found), tuple(expected))
    assert torch.equal(found[1][1], untouched[1]) and torch.equal(found[1][2, :, :9], untouched[2, :, :9])


@settings(max_examples=3)
@given(dtypes, st.integers(2, 6), st.integers(0, 5))
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype, size, row):
    row %= size
    x, delta, weight = (numbers(*s, dtype=dtype, seed=len(s)) for s in ((1, size, 300), (1, size, 300), (300,)))
    one = slice(row, row + 1)
    for whole, alone in zip(
        gpu_kernels.add_rms_norm(x, delta, weight, 1e-5),
        gpu_kernels.add_rms_norm(x[:, one], delta[:, one], weight, 1e-5),
        strict=True,
    ):
        assert torch.equal(whole[:, one], alone)
    assert torch.equal(gpu_kernels.silu_and_mul(x, delta)[:, one], gpu_kernels.silu_and_mul(x[:, one], delta[:, one]))
    of_all, of_one = (of_rope(dtype, 4, 2, 16, 16, size, True, False, 0) for _ in range(2))
    of_one[:5] = [part[:, one] for part in of_one[:5]]
    of_one[-1] = row
    assert torch.equal(gpu_kernels.rope_and_write_kv(*of_all)[:, :, one], gpu_kernels.rope_and_write_kv(*of_one))
    assert torch.equal(of_all[8][2, :, 9 + row], of_one[8][2, :, 9 + row])
