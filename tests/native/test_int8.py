"""Int8 arithmetic: rows rounded to eight bits in blocks of 32, whole-number products with stored weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft.native.dequantise import FORMATS
from longdraft.native.stored import HALVES, Stored, rounded_to_int8
from tests.native.levels import LEVELS, kernels_of
from tests.native.test_stored import EXPONENTS, SCALES, stored

KINDS = [kind for kind in FORMATS if kind not in HALVES]


def in_int8(kind: str, outs: int, size: int, seed: int = 0) -> Stored:
    plain = stored(kind, outs, size, seed)
    return Stored(plain.data, plain.format, int8=True)


def expected(x: torch.Tensor, w: Stored) -> torch.Tensor:
    """The reference: what rounded rows and unpacked weights give, in double precision."""
    return (rounded_to_int8(x).double() @ w.floats().double().T).float()


def test_rounded_rows_are_at_most_half_a_step_off():
    x = torch.randn(5, 320, generator=torch.Generator().manual_seed(0))
    blocks, rounded = x.view(5, -1, 32), rounded_to_int8(x).view(5, -1, 32)
    step = blocks.abs().amax(-1, keepdim=True) / 127
    assert bool(((blocks - rounded).abs() <= step * 0.5001).all())
    assert torch.equal(rounded_to_int8(torch.zeros(1, 32)), torch.zeros(1, 32))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=4, deadline=None)
@given(rows=st.integers(1, 40), outs=st.integers(1, 90), blocks=st.integers(1, 3), seed=st.integers(0, 99))
def test_products_are_those_of_rounded_rows(kernels, kind, rows, outs, blocks, seed):
    w = in_int8(kind, outs, blocks * 256, seed)
    generator = torch.Generator().manual_seed(seed)
    x, bias = (torch.randn(n, generator=generator) for n in ((rows, blocks * 256), (outs,)))
    found = kernels.linear(x, [(w, bias)])[0]
    want = expected(x, w) + bias
    # Sums of numbers that cancel: as far off as their sizes allow.
    room = rounded_to_int8(x).abs() @ w.floats().abs().T
    assert bool(((found - want).abs() <= 2e-6 * room + 1e-6 * want.abs() + 1e-6).all())


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=4, deadline=None)
@given(rows=st.integers(1, 40), outs=st.integers(1, 90), blocks=st.integers(1, 3), seed=st.integers(0, 99))
def test_a_row_gets_the_same_bits_alone_among_others_and_with_every_instruction_set(kind, rows, outs, blocks, seed):
    w = in_int8(kind, outs, blocks * 256, seed)
    x = torch.randn(rows, blocks * 256, generator=torch.Generator().manual_seed(seed))
    found = {level: kernels_of(level).linear(x, [(w, None)])[0] for level in LEVELS if "v2" not in level}
    for level, together in found.items():
        alone = torch.cat([kernels_of(level).linear(row[None], [(w, None)])[0] for row in x])
        assert torch.equal(together, alone)
    assert all(torch.equal(together, next(iter(found.values()))) for together in found.values())


def test_rows_of_every_size_of_blocks_of_32(kernels):
    for blocks in (1, 2, 7, 8, 9, 18):
        w = in_int8("Q4_1", 20, 32 * blocks)
        x = torch.randn(3, 32 * blocks, generator=torch.Generator().manual_seed(blocks))
        assert torch.allclose(kernels.linear(x, [(w, None)])[0], expected(x, w), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("rows", [2, 12])
def test_what_is_no_number_stays_none_and_harms_no_other_row(kernels, rows):
    w = in_int8("Q4_K", 33, 512)
    x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(0))
    fine = kernels.linear(x, [(w, None)])[0]
    for number in (float("nan"), float("inf"), float("-inf")):
        spoiled = x.clone()
        spoiled[1, 300] = number
        found = kernels.linear(spoiled, [(w, None)])[0]
        assert bool(found[1].isnan().all()) and torch.equal(found[0], fine[0]) and torch.equal(found[2:], fine[2:])
    tiny = kernels.linear(torch.full_like(x, 1e-41), [(w, None)])[0]
    assert torch.equal(tiny, torch.zeros_like(tiny))


@pytest.mark.parametrize("kind", KINDS)
def test_largest_numbers_do_not_overflow(kernels, kind):
    plain = stored(kind, 16, 256)
    for number in (0xFF, 0x80, 0x7F):
        w = Stored(largest(plain, number), kind, int8=True)
        x = torch.full((1, 256), 3.0)
        x[:, ::2] = -3.0
        for rows in (x, x.abs(), -x.abs()):
            room = rows.abs() @ w.floats().abs().T
            assert bool(((kernels.linear(rows, [(w, None)])[0] - expected(rows, w)).abs() <= 2e-6 * room).all())


def largest(w: Stored, number: int) -> torch.Tensor:
    """The same blocks with all bytes but their scales' floats being one number."""
    kept = [at + i for at in SCALES.get(w.format, ()) for i in range(2)]
    kept += [EXPONENTS[w.format]] if w.format in EXPONENTS else []
    blocks = w.data.view(len(w.data), -1, FORMATS[w.format][1])
    data = torch.full_like(blocks, number)
    data[..., kept] = blocks[..., kept]
    return data.flatten(1)


def test_matrices_of_both_arithmetics_meet_the_same_rows():
    if not LEVELS:
        pytest.skip("no kernels")
    kernels = kernels_of(LEVELS[0])
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(0))
    mixed = [in_int8("Q4_K", 40, 256), stored("F16", 70, 256), torch.randn(30, 256)]
    together = kernels.linear(x, [(w, None) for w in mixed])
    for w, found in zip(mixed, together, strict=True):
        assert torch.equal(found, kernels.linear(x, [(w, None)])[0])


def test_halves_have_no_int8_arithmetic():
    with pytest.raises(ValueError, match="8 bits or fewer, not for F16"):
        in_int8("F16", 2, 32)
