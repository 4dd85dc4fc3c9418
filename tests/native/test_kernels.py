"""The kernels compute what torch computes, for every instruction set that this machine executes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from longdraft import native
from tests.native.levels import LEVELS, kernels_of

pytestmark = pytest.mark.skipif(not LEVELS, reason=f"no kernels here: {native.missing()}")


# --- products ---


@given(
    rows=st.integers(1, 70),
    size=st.integers(1, 70),
    outs=st.integers(1, 60),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products_of_any_shape(kernels, rows, size, outs, bias, seed):
    g = torch.Generator().manual_seed(seed)
    x, w = torch.randn(rows, size, generator=g), torch.randn(outs, size, generator=g)
    b = torch.randn(outs, generator=g) if bias else None
    torch.testing.assert_close(kernels.linear(x, [(w, b)])[0], F.linear(x, w, b), rtol=1e-5, atol=2e-5)


def test_several_matrices_in_one_call_and_threads(kernels):
    x = torch.randn(2, 5, 96)
    weights = [(torch.randn(outs, 96), None) for outs in (100, 1, 24, 25)]
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for (w, _), y in zip(weights, kernels.linear(x, weights), strict=True):
            torch.testing.assert_close(y, F.linear(x, w), rtol=1e-5, atol=2e-5)


def test_strided_weights_and_rows(kernels):
    x, w = torch.randn(30, 4).t(), torch.randn(20, 64)[:, :30]
    torch.testing.assert_close(kernels.linear(x, [(w, None)])[0], F.linear(x, w), rtol=1e-5, atol=1e-5)


def test_nan_and_infinity_stay_what_they_are(kernels):
    x, w = torch.ones(3, 20), torch.ones(4, 20)
    w[1, 3], w[2, 3] = float("nan"), float("inf")
    y = kernels.linear(x, [(w, None)])[0]
    assert torch.isnan(y[:, 1]).all()
    assert torch.isinf(y[:, 2]).all()
    assert (y[:, [0, 3]] == 20).all()


# --- attention ---


def keys_and_values(heads: int, n: int, d: int, transposed: bool, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views into something larger, as a slot's rows are."""
    g = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(heads, n + 9, d, generator=g) for _ in range(2))
    if transposed:
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
    return k[:, :n], v[:, :n]


def expected(q, k, v, tree, scale, group):
    """In float64, with the mask written out."""
    size = q.shape[1] // group
    mask = torch.ones(size, k.shape[1], dtype=torch.bool)
    if tree is not None:
        mask[:, k.shape[1] - tree.shape[1] :] = tree
    scores = (q.double() @ k.double().transpose(1, 2)) * scale
    scores = scores.masked_fill(~mask.repeat(group, 1), float("-inf"))
    return (scores.softmax(-1) @ v.double()).float()


@given(
    n=st.one_of(st.integers(1, 40), st.integers(100, 600)),
    size=st.integers(1, 20),
    group=st.integers(1, 4),
    d=st.sampled_from([16, 48, 64, 128]),
    transposed=st.booleans(),
    masked=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_attention_of_any_shape(kernels, n, size, group, d, transposed, masked, threads, seed):
    torch.set_num_threads(threads)
    g = torch.Generator().manual_seed(seed)
    k, v = keys_and_values(2, n, d, transposed, seed)
    q = 3 * torch.randn(2, group * size, d, generator=g)
    tree = None
    if masked:
        width = min(size, n)
        tree = torch.rand(size, width, generator=g) < 0.5
        tree[:, 0] = True
    found = kernels.attend(q, k, v, tree, d**-0.5)
    torch.testing.assert_close(found, expected(q, k, v, tree, d**-0.5, group), rtol=2e-5, atol=2e-5)


@given(
    before=st.one_of(st.integers(0, 20), st.integers(100, 400)),
    rows=st.one_of(st.integers(1, 20), st.integers(90, 210)),
    group=st.integers(1, 3),
    transposed=st.booleans(),
    threads=st.integers(1, 3),
)
def test_a_chunk_of_a_prompt(kernels, before, rows, group, transposed, threads):
    torch.set_num_threads(threads)
    k, v = keys_and_values(2, before + rows, 32, transposed, 1)
    q = torch.randn(2 * group, rows, 32)
    tree = torch.ones(rows, rows, dtype=torch.bool).tril()
    found = kernels.attend_chunk(q, k, v, 0.2)
    wanted = expected(q.reshape(2, group * rows, 32), k, v, tree, 0.2, group)
    torch.testing.assert_close(found, wanted.view_as(found), rtol=2e-5, atol=2e-5)


def test_scores_far_apart_and_large(kernels):
    """A running maximum that rises late, and weights that vanish."""
    k, v = keys_and_values(1, 700, 16, True, 0)
    k = k.clone()
    k[0, 650] *= 50
    q = 20 * torch.randn(1, 4, 16)
    torch.testing.assert_close(
        kernels.attend(q, k, v, None, 1.0), expected(q, k, v, None, 1.0, 4), rtol=1e-4, atol=1e-4
    )


def test_a_nan_is_not_lost(kernels):
    k, v = keys_and_values(1, 300, 16, True, 0)
    k = k.clone()
    k[0, 200, 3] = float("nan")
    assert torch.isnan(kernels.attend(torch.randn(1, 2, 16), k, v, None, 1.0)).all()


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        (lambda q, k, v: (q, k, v), True),
        (lambda q, k, v: (q.double(), k, v), False),
        (lambda q, k, v: (q[..., :8], k[..., :8], v[..., :8]), False),
        (lambda q, k, v: (q, k[..., ::2].repeat(1, 1, 2)[..., ::2], v), False),
        (lambda q, k, v: (q, k[:, :0], v[:, :0]), False),
    ],
    ids=["plain", "double", "head size", "strides", "no keys"],
)
def test_what_the_kernel_takes(change, taken):
    k, v = keys_and_values(2, 20, 16, True, 0)
    assert native.fits(*change(torch.randn(2, 3, 16), k, v)) == taken


def test_a_profiler_sees_the_kernels_by_name():
    own = kernels_of(LEVELS[0])
    w, x = torch.randn(24, 32), torch.randn(2, 32)
    expected = own.linear(x, [(w, None)])[0]
    with torch.profiler.profile() as profile:
        found = own.linear(x, [(w, None)])[0]
    assert torch.equal(found, expected)
    assert "longdraft::linear" in {event.key for event in profile.key_averages()}
