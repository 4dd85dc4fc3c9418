"""Products with the matrices of chosen experts: to the bit those of each expert's matrix with each row alone."""

from __future__ import annotations

import pytest
import torch

from longdraft.native import Stored
from longdraft.native.experts import ExpertProducts, ExpertWeights
from tests.native.test_stored import stored

COUNT, OUT = 5, 50
# Experts, and the numbers of their rows.
CHOSEN = {4: 1, 0: 7, 2: 11}
STARTS = [0, 1, 8, 19]


def checked(kernels, weights: list[ExpertWeights], matrices: list[list[Stored | torch.Tensor]]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(STARTS[-1], weights[0].shape[1], generator=generator)
    got = ExpertProducts(kernels, weights)(x, list(CHOSEN), STARTS)
    for kind, own in enumerate(matrices):
        wanted = []
        for expert, start, end in zip(CHOSEN, STARTS, STARTS[1:], strict=False):
            bias = weights[kind].bias
            pair = (own[expert], None if bias is None else bias[expert])
            wanted += [kernels.linear(row, [pair])[0] for row in x[start:end].split(1)]
        assert torch.equal(got[kind], torch.cat(wanted))


@pytest.mark.parametrize("size", [64, 70])
def test_floats(kernels, size):
    w, bias = torch.randn(2, COUNT, OUT, size), torch.randn(COUNT, OUT)
    checked(kernels, [ExpertWeights(w[0], bias), ExpertWeights(w[1])], [list(w[0]), list(w[1])])


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "MXFP4"])
def test_stored_matrices(kernels, kind, int8):
    whole = stored(kind, COUNT * OUT, 256).computing(int8)
    each = [Stored(rows, kind, int8) for rows in whole.data.split(OUT)]
    checked(kernels, [ExpertWeights(whole, torch.randn(COUNT, OUT), count=COUNT)], [each])


@pytest.mark.parametrize("outs", [1, 16, 50])
def test_floats_that_lie_by_input(kernels, outs):
    w, bias, x = torch.randn(COUNT, 70, outs), torch.randn(COUNT, outs), torch.randn(STARTS[-1], 70)
    products = ExpertProducts(kernels, [ExpertWeights(w, bias, by_input=True)])
    (got,) = products(x, list(CHOSEN), STARTS)
    for expert, start, end in zip(CHOSEN, STARTS, STARTS[1:], strict=False):
        torch.testing.assert_close(got[start:end], x[start:end] @ w[expert] + bias[expert], rtol=1e-4, atol=1e-4)
        alone = [products(row, [expert], [0, 1])[0] for row in x[start:end].split(1)]
        assert torch.equal(got[start:end], torch.cat(alone))


def test_matrices_of_two_shapes_are_refused(kernels):
    with pytest.raises(ValueError, match="shape"):
        ExpertProducts(kernels, [ExpertWeights(torch.ones(2, 3, 4)), ExpertWeights(torch.ones(2, 4, 4))])
