"""Rows of recurrent layers by our kernel: what the formula says, and the same bits whatever is beside a row."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from longdraft.native.recurrent import (
    LinearRecurrence,
    RecurrentInputs,
    RecurrentSequence,
    TreeOrder,
    convolve,
    run_recurrence,
)
from tests.native.levels import needs_kernels
from tests.support.slow_marks import rotate_pairs

pytestmark = needs_kernels

# Heads, key heads, keys, values.
SIZES = [(4, 2, 16, 16), (3, 3, 20, 40), (2, 1, 128, 128), (6, 2, 7, 5)]
KINDS = ["gated", "by key", "mamba"]
# A chain of three with two branches, and another tree behind the committed rows.
PARENTS = [-1, 0, 1, 0, 3, -1]
WHOLE, ALONE = TreeOrder(PARENTS, range(len(PARENTS)), 0), TreeOrder([-1], [0], 0)


def rows_of(kind: str, sizes: tuple[int, int, int, int], count: int, seed: int) -> RecurrentInputs:
    heads, key_heads, keys, values = sizes
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(count, key_heads, keys, generator=g) for _ in "qk")
    v, beta = torch.randn(count, heads, values, generator=g), torch.rand(count, heads, generator=g)
    decays = -torch.rand(count, heads, *([keys] if kind == "by key" else []), generator=g)
    return RecurrentInputs(q, k, v, decays + 0.3 if kind == "mamba" else decays, None if kind == "mamba" else beta)


def recurrence(kind: str, sizes: tuple[int, int, int, int]) -> LinearRecurrence:
    if kind != "mamba":
        return LinearRecurrence(True, qk_l2norm=True, scale=sizes[2] ** -0.5)
    a, bias, skip = torch.randn(3, sizes[0], generator=torch.Generator().manual_seed(9)).unbind()
    return LinearRecurrence(False, a=-a.exp(), dt_bias=bias.contiguous(), d_skip=skip.contiguous())


def by_formula(
    r: LinearRecurrence, state: torch.Tensor, rows: RecurrentInputs, row: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and next state of a token, in float64."""
    each = state.shape[0] // rows.k.shape[1]
    q, k = (x[row].double().repeat_interleave(each, 0) for x in (rows.q, rows.k))
    if r.qk_l2norm:
        q, k = (x * ((x * x).sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    v, g = rows.v[row].double(), rows.g[row].double()
    if r.a is not None:
        beta = F.softplus(g + r.dt_bias)
        decay = (beta * r.a).exp()[:, None]
    else:
        beta, decay = rows.beta[row].double(), g.exp() if g.dim() == 2 else g.exp()[:, None]
    state = state * decay[..., None]
    u = v - torch.einsum("hkv,hk->hv", state, k) if r.delta_rule else v
    state = state + k[..., None] * (u * beta[:, None])[:, None]
    out = torch.einsum("hkv,hk->hv", state, q) * r.scale
    return out if r.d_skip is None else out + v * r.d_skip[:, None], state


@pytest.mark.parametrize(("kind", "sizes"), rotate_pairs(KINDS, SIZES, group_size=2), ids=str)
def test_tokens_match_the_formula_and_have_the_same_bits_alone(kernels, kind, sizes):
    kernel, r = partial(run_recurrence, kernels), recurrence(kind, sizes)
    start = torch.randn(sizes[0], sizes[2], sizes[3], generator=torch.manual_seed(1))
    pending, rows = rows_of(kind, sizes, 2, 2), rows_of(kind, sizes, len(PARENTS), 3)
    state = start.clone()
    found = kernel(r, [RecurrentSequence(state, pending, rows, WHOLE)])[0]
    committed = start.double()
    for row in range(2):
        _, committed = by_formula(r, committed, pending, row)
    torch.testing.assert_close(state.double(), committed, rtol=1e-4, atol=1e-4)
    states = {-1: committed}
    for row, parent in enumerate(PARENTS):
        expected, states[row] = by_formula(r, states[parent], rows, row)
        torch.testing.assert_close(found[row].double(), expected, rtol=1e-4, atol=1e-4)

    # Beside another tree, level by level, and by plain steps with the rows before them pending.
    other = RecurrentSequence(start * 2, rows_of(kind, sizes, 1, 4), rows_of(kind, sizes, 6, 5), WHOLE)
    sequence = RecurrentSequence(state.clone(), (), rows, WHOLE)
    assert torch.equal(kernel(r, [other, sequence])[1], found)

    def some(*chosen: int) -> RecurrentInputs:
        return RecurrentInputs(*(None if x is None else x[list(chosen)] for x in rows))

    last = RecurrentSequence(state.clone(), (), rows, TreeOrder(PARENTS, [0, 3, 4, 5], 4))
    assert torch.equal(kernel(r, [last])[0], found[4:])
    assert torch.equal(kernel(r, [RecurrentSequence(state.clone(), some(0, 3), some(4), ALONE)])[0, 0], found[4])
    plain = state.clone()
    for path, row in (((), 0), ((0,), 1), ((1,), 2)):
        step = RecurrentSequence(plain, some(*path) if path else (), some(row), ALONE)
        assert torch.equal(kernel(r, [step])[0, 0], found[row])


@pytest.mark.parametrize(("channels", "size"), [(5, 4), (64, 2), (300, 10)])
def test_causal_convolution_of_a_tree(kernels, channels, size):
    g = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(channels, size, generator=g), torch.randn(channels, generator=g)
    window, rows = torch.randn(size - 1, channels, generator=g), torch.randn(4, channels, generator=g)
    places = torch.randint(0, size + 3, (6, size), generator=g)
    for silu in (False, True):
        out = convolve(kernels, weight, bias, silu, [(window, rows)] * 2, [places, places.flip(0)])
        expected = torch.einsum("tkc,ck->tc", torch.cat([window, rows])[places], weight) + bias
        torch.testing.assert_close(out[0], F.silu(expected) if silu else expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(out[1], out[0].flip(0))
        alone = convolve(kernels, weight, bias, silu, [(window, rows)], [places[2:3]])
        assert torch.equal(alone[0, 0], out[0, 2])
