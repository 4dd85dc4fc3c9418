"""Matrix products with weights in every format, on all instruction sets: their values, and a row's bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft.model.quant.stored import quantize_for_draft
from longdraft.native import QuantizedMatrix
from longdraft.native.boundary import address
from longdraft.native.experts import ExpertWeights, GroupedGemm
from longdraft.native.quantized_matrix import HALF_DTYPES, QUANT_SIZES, fake_quantize_int8
from tests.native.cases import (
    BLOCKS,
    EXPONENTS,
    FORMS,
    SCALES,
    dequantized_by_gguf,
    generator,
    matrix,
    stored,
)
from tests.native.levels import COMPARED_LEVELS, kernels_of

pytest.importorskip("gguf")
every_form = pytest.mark.parametrize("form", FORMS)


def dequantize(w) -> torch.Tensor:
    return w if isinstance(w, torch.Tensor) else w.dequantize()


def expected(x: torch.Tensor, w, bias: torch.Tensor | float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """The product of the dequantized operands in float64, and its tolerance."""
    weights = dequantize(w).double()
    x = fake_quantize_int8(x, w.format) if getattr(w, "int8", False) else x
    want = x.double() @ weights.T + bias
    # Sums of numbers that cancel are as far off as their sizes allow.
    room = 2e-6 * (x.double().abs() @ weights.abs().T) + 1e-6 * want.abs() + 1e-6
    return want, room


@every_form
@settings(max_examples=8)
@given(
    rows=st.integers(1, 40),
    outs=st.integers(1, 90),
    size=st.integers(1, 200),
    threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_products_match_the_definition_and_a_row_has_the_same_bits_alone(
    kernels, form, rows, outs, size, threads, seed
):
    """With any number of threads; quantized weights give the bits of dequantized ones."""
    size = size if form == "float32" else 256 * (1 + size % 3)
    w = matrix(form, outs, size, seed)
    x, bias = (torch.randn(n, generator=generator(seed)) for n in ((rows, size), (outs,)))
    torch.set_num_threads(threads)
    found = kernels.linear(x, [(w, bias)])[0]
    torch.set_num_threads(1)
    want, room = expected(x, w, bias)
    assert bool(((found - want).abs() <= room).all())
    alone = torch.cat([kernels.linear(row[None], [(w, bias)])[0] for row in x])
    assert torch.equal(found, alone)
    if isinstance(w, QuantizedMatrix) and not w.int8:
        assert torch.equal(found, kernels.linear(x, [(kernels.dequantize(w), bias)])[0])


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("float32", *QUANT_SIZES)])
@settings(max_examples=3)
@given(
    rows=st.integers(1, 80),
    outs=st.sampled_from([1, 16, 41, 48]),
    size=st.sampled_from([512, 2304]),
    seed=st.integers(0, 99),
)
def test_int8_gives_the_same_bits_on_every_instruction_set_and_repacked(form, rows, outs, size, seed):
    w, x = matrix(form, outs, size, seed), torch.randn(rows, size, generator=generator(seed))
    ways = [(own, w) for own in map(kernels_of, COMPARED_LEVELS)]
    ways += [(kernels, kernels.repack(w)) for kernels, _ in ways if kernels.can_repack(w)]
    assert len(ways) >= len(COMPARED_LEVELS) * (1 + (outs % 16 == 0))
    found = [own.linear(x, [(each, None)])[0] for own, each in ways]
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("form", [form for form in FORMS if form.endswith("in int8")])
@settings(max_examples=4)
@given(
    rows=st.sampled_from([1, 7, 33, 530]),
    outs=st.sampled_from([1, 16, 41, 48, 300]),
    blocks=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_prefill_is_in_bfloat16_with_amx(kernels, form, rows, outs, blocks, seed):
    """Without AMX it is as decoding. A row has the bits that it has alone, with any number of threads."""
    size = blocks * max(64, QUANT_SIZES[form.split()[0]][0])
    w = matrix(form, outs, size, seed)
    x, bias = (torch.randn(n, generator=generator(seed)) for n in ((rows, size), (outs,)))
    found = kernels.linear(x, [(w, bias)], prefill=True)[0]
    torch.set_num_threads(2)
    assert torch.equal(found, kernels.linear(x, [(w, bias)], prefill=True)[0])
    torch.set_num_threads(1)
    some = torch.cat([kernels.linear(row[None], [(w, bias)], prefill=True)[0] for row in x[-40:]])
    assert torch.equal(found[-40:], some)
    if kernels.can_repack(w):
        assert torch.equal(found, kernels.linear(x, [(kernels.repack(w), bias)], prefill=True)[0])
    if not kernels.level.endswith("amx"):
        assert torch.equal(found, kernels.linear(x, [(w, bias)])[0])
        return
    weights = w.dequantize().double()
    off = (found - bias - x.double() @ weights.T).abs()
    # Half a spacing of bfloat16, on both sides.
    assert bool((off <= 2.01**-8 * (x.abs().double() @ weights.abs().T) + 1e-6).all())
    assert bool(off.any())


def test_several_matrices_of_all_forms_in_one_call(kernels):
    """Of other sizes, strided rows and weights among them."""
    x = torch.randn(256, 9, generator=generator(0)).t()
    weights = [matrix(form, outs, 256) for form, outs in (("Q4_K in int8", 40), ("F16", 70), ("float32", 1))]
    weights.append(torch.randn(20, 300)[:, :256])
    together = kernels.linear(x, [(w, None) for w in weights])
    for w, found in zip(weights, together, strict=True):
        assert torch.equal(found, kernels.linear(x, [(w, None)])[0])
        want, room = expected(x, w)
        assert bool(((found - want).abs() <= room).all())


@pytest.mark.parametrize(
    ("form", "rows", "prefill"),
    [(form, rows, False) for form in ("float32", "Q4_K", "Q4_K in int8") for rows in (3, 12)]
    + [("Q4_K in int8", 12, True)],
)
def test_nan_and_infinity_stay_in_their_row(kernels, form, rows, prefill):
    w, x = matrix(form, 33, 512), torch.randn(rows, 512, generator=generator(0))
    fine = kernels.linear(x, [(w, None)], prefill)[0]
    for number in (float("nan"), float("inf"), float("-inf")):
        spoiled = x.clone()
        spoiled[1, 300] = number
        found = kernels.linear(spoiled, [(w, None)], prefill)[0]
        assert not found[1].isfinite().any()
        assert torch.equal(found[0], fine[0]) and torch.equal(found[2:], fine[2:])
    weights = torch.ones(4, 20)
    weights[1, 3], weights[2, 3] = float("nan"), float("inf")
    y = kernels.linear(torch.ones(3, 20), [(weights, None)])[0]
    assert y[:, 1].isnan().all() and y[:, 2].isinf().all() and (y[:, [0, 3]] == 20).all()


@pytest.mark.parametrize("kind", QUANT_SIZES)
def test_dequantized_values_equal_ggufs(kernels, kind):
    """With moderate, tiny, large, negative and zero scales; all float16 values, NaN too."""
    if kind in HALF_DTYPES:
        bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
        want = bits.view(torch.bfloat16 if kind == "BF16" else torch.float16).view(256, 256).float()
        found = kernels.dequantize(QuantizedMatrix(bits.view(256, 256).view(torch.uint8), kind))
        assert torch.equal(found.isnan(), want.isnan()) and torch.equal(found.nan_to_num(7), want.nan_to_num(7))
    odd = stored(kind, 4, 256)
    for row, (scale, exponent) in enumerate(((6e-8, 0), (65504.0, 250), (-3e-5, 1), (0.0, 2))):
        if kind in EXPONENTS:
            odd.data[row, EXPONENTS[kind]] = exponent
        elif kind in SCALES:
            at = SCALES[kind][0]
            odd.data[row, at : at + 2] = torch.tensor([scale], dtype=torch.float16).view(torch.uint8)
    for w in (odd, stored(kind, 7, 512, 1), stored(kind, 7, 512, 2)):
        assert torch.equal(kernels.dequantize(w), dequantized_by_gguf(w)) and torch.equal(
            w.dequantize(), dequantized_by_gguf(w)
        )


@pytest.mark.parametrize("kind", BLOCKS)
def test_largest_codes_do_not_overflow_in_int8(kernels, kind):
    w = stored(kind, 16, 256, int8=True)
    kept = [at + i for at in SCALES.get(kind, ()) for i in range(2)] + [
        at for name, at in EXPONENTS.items() if name == kind
    ]
    x = torch.full((1, 256), 3.0)
    x[:, ::2] = -3.0
    for number in (0xFF, 0x80, 0x7F):
        blocks = w.data.view(len(w.data), -1, QUANT_SIZES[kind][1])
        blocks[..., [i for i in range(blocks.shape[-1]) if i not in kept]] = number
        for rows in (x, x.abs(), -x.abs()):
            want, room = expected(rows, w)
            assert bool(((kernels.linear(rows, [(w, None)])[0] - want).abs() <= room).all())


# --- numbers that are rounded ---


def test_rows_and_weights_are_rounded_to_the_nearest():
    x = torch.randn(5, 512, generator=generator(0))
    for kind, each in (("Q8_0", 32), ("Q4_K", 128)):
        blocks, found = x.view(5, -1, each), fake_quantize_int8(x, kind).view(5, -1, each)
        assert bool(((blocks - found).abs() <= blocks.abs().amax(-1, keepdim=True) / 127 * 0.5001).all())
        assert not fake_quantize_int8(torch.zeros(1, each), kind).any()
        assert not fake_quantize_int8(torch.full((1, each), 1e-41), kind).any()
    w = torch.randn(5000, 96, generator=generator(0))  # more rows than are rounded at a time
    w[7] = 0
    blocks = w.unflatten(1, (-1, 32))
    end = blocks.gather(2, blocks.abs().argmax(2, keepdim=True))
    largest, opposite = end.abs().expand_as(blocks).flatten(1), (blocks / end < -0.9).flatten(1)
    for bits, step in ((8, largest / 127), (4, largest / 8)):
        found = quantize_for_draft(w, bits)
        # Halves are rounded too, and of four bits the end opposite to the largest number is a step away.
        off = (found.dequantize() - w).abs()
        assert bool((off <= 1.01 * step).all()) and bool((off <= 0.57 * step)[~opposite | (bits == 8)].all())
        assert bool((off <= 1e-3 * largest)[w.abs() == largest].all())
        assert found.int8 and not found.dequantize()[7].any()
        assert quantize_for_draft(found, bits).data is found.data


@pytest.mark.parametrize("kind", QUANT_SIZES)
def test_a_drafts_matrix_keeps_formats_of_few_bits(kind):
    w = stored(kind, 5, 512)
    eight, four = quantize_for_draft(w), quantize_for_draft(w, 4)
    assert eight.format == ("Q8_0" if kind in HALF_DTYPES else kind) and eight.int8 and four.int8
    assert four.format == (kind if w.bits_per_weight <= 5 else "Q4_0")
    torch.testing.assert_close(eight.dequantize(), w.dequantize(), rtol=0, atol=float(w.dequantize().abs().max()) / 100)
    assert torch.equal(quantize_for_draft(w.dequantize()[:, :40]), w.dequantize()[:, :40])


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: QuantizedMatrix(torch.zeros(2, 20, dtype=torch.uint8), "TQ1_0"), "TQ1_0"),
        (lambda: QuantizedMatrix(torch.zeros(2, 21, dtype=torch.uint8), "Q4_1"), "Q4_1"),
        (lambda: QuantizedMatrix(torch.zeros(2, 20), "Q4_1"), "float32"),
        (lambda: stored("F16", 2, 32, int8=True), "F16"),
        (lambda: GroupedGemm(None, [ExpertWeights(torch.ones(2, *s)) for s in ((3, 4), (4, 4))]), "shape"),
    ],
)
def test_what_is_no_matrix_of_these_is_refused(made, says):
    with pytest.raises(ValueError, match=says):
        made()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 8, dtype=torch.bfloat16),
        torch.zeros(4, 8, dtype=torch.float64),
        torch.zeros(8, 4, dtype=torch.float32).T,
        torch.zeros(4, 8, dtype=torch.float32, device="meta"),
        torch.zeros(3, 8, dtype=torch.float32),
    ],
)
def test_tensors_that_a_kernel_would_misread_are_refused(tensor):
    with pytest.raises(TypeError):
        address(tensor, min_numel=32)


def test_a_product_of_other_sizes_is_refused(kernels):
    weights = torch.ones(8, 64, dtype=torch.float32)
    for wrong in (
        weights[:, :32].contiguous(),
        weights.double(),
        QuantizedMatrix.from_half(weights[:, :32].bfloat16()),
    ):
        with pytest.raises(TypeError):
            kernels.linear(torch.ones(2, 64, dtype=torch.float32), [(wrong, None)])


# --- products with the matrices of chosen experts ---

COUNT = 5
# Experts, and the first of their rows.
CHOSEN, STARTS = [4, 0, 2], [0, 1, 8, 19]


def of_experts(kernels, form: str, outs: int) -> tuple[ExpertWeights, list]:
    """Weights of all experts, repacked if possible, and the matrix of each expert."""
    whole, bias = matrix(form, COUNT * outs, 256), torch.randn(COUNT, outs, generator=generator(1))
    if isinstance(whole, QuantizedMatrix):
        matrices = [QuantizedMatrix(rows, whole.format, whole.int8) for rows in whole.data.split(outs)]
        whole = kernels.repack(whole) if kernels.can_repack(whole, outs) else whole
        return ExpertWeights(whole, bias, num_experts=COUNT), matrices
    return ExpertWeights(whole.view(COUNT, outs, 256), bias), list(whole.split(outs))


@pytest.mark.parametrize("outs", [48, 50])
@pytest.mark.parametrize("form", ["float32", "Q8_0", "Q8_0 in int8", "Q4_K", "Q4_K in int8", "MXFP4"])
def test_a_row_of_an_expert_has_the_bits_of_a_product_with_its_matrix(kernels, form, outs):
    weights, own = of_experts(kernels, form, outs)
    x = torch.randn(STARTS[-1], 256, generator=generator(0))
    (found,) = GroupedGemm(kernels, [weights])(x, CHOSEN, STARTS)
    for expert, start, end in zip(CHOSEN, STARTS, STARTS[1:], strict=False):
        alone = [kernels.linear(row, [(own[expert], weights.bias[expert])])[0] for row in x[start:end].split(1)]
        assert torch.equal(found[start:end], torch.cat(alone))


@pytest.mark.parametrize("outs", [1, 16, 50])
def test_experts_with_transposed_weights(kernels, outs):
    g = generator(0)
    w, bias, x = (torch.randn(*shape, generator=g) for shape in ((COUNT, 70, outs), (COUNT, outs), (STARTS[-1], 70)))
    products = GroupedGemm(kernels, [ExpertWeights(w, bias, transposed=True)])
    (found,) = products(x, CHOSEN, STARTS)
    for expert, start, end in zip(CHOSEN, STARTS, STARTS[1:], strict=False):
        torch.testing.assert_close(found[start:end], x[start:end] @ w[expert] + bias[expert], rtol=1e-4, atol=1e-4)
        alone = [products(row, [expert], [0, 1])[0] for row in x[start:end].split(1)]
        assert torch.equal(found[start:end], torch.cat(alone))
