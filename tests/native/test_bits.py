"""To the bit: a row of a tree or chain gets from the kernels what plain decoding would get, whoever is beside it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from longdraft import native
from tests.native.levels import LEVELS

pytestmark = pytest.mark.skipif(not LEVELS, reason=f"no kernels here: {native.missing()}")


def random_tree(size: int, seed: int, deep: float = 0.5) -> tuple[list[int], torch.Tensor]:
    """Parents and ancestor mask (size, size) of a random tree.

    Args:
        deep: how often a node hangs under the one before it: 1 makes a chain.
    """
    g = torch.Generator().manual_seed(seed)
    parents, mask = [-1], torch.eye(size, dtype=torch.bool)
    for node in range(1, size):
        chain = float(torch.rand((), generator=g)) < deep
        parents.append(node - 1 if chain else int(torch.randint(node, (), generator=g)))
        mask[node] |= mask[parents[node]]
    return parents, mask


def keys_and_values(heads: int, n: int, d: int, transposed: bool, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(heads, n, d, generator=g) for _ in range(2))
    return (k.transpose(1, 2).contiguous().transpose(1, 2) if transposed else k), v


# Prefixes beside the borders of blocks (128 keys) and segments (512 keys), where a path crosses into the next one.
PREFIXES = st.one_of(st.integers(0, 40), st.integers(110, 135), st.integers(490, 520), st.integers(1000, 1100))


@given(
    prefix=PREFIXES,
    size=st.one_of(st.integers(1, 24), st.integers(100, 150)),
    deep=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    group=st.integers(1, 3),
    transposed=st.booleans(),
    sharp=st.sampled_from([0.3, 3.0, 30.0]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 999),
)
@example(prefix=500, size=150, deep=1.0, group=2, transposed=True, sharp=3.0, threads=2, seed=0)
@example(prefix=512, size=9, deep=0.5, group=1, transposed=False, sharp=3.0, threads=3, seed=0)
def test_attention_in_a_tree(kernels, prefix, size, deep, group, transposed, sharp, threads, seed):
    heads, d = 2, 32
    _, mask = random_tree(size, seed, deep)
    k, v = keys_and_values(heads, prefix + size, d, transposed, seed)
    q = sharp * torch.randn(heads, group * size, d, generator=torch.Generator().manual_seed(seed + 1))
    torch.set_num_threads(threads)
    found = kernels.attend(q, k, v, mask, 0.2).view(heads, group, size, d)
    torch.set_num_threads(1)
    for node in {0, 1 % size, size // 3, size // 2, size - 1}:
        rows = torch.cat([torch.arange(prefix), prefix + mask[node].nonzero()[:, 0]])
        alone = kernels.attend(q.view(heads, group, size, d)[:, :, node], *(x[:, rows] for x in (k, v)), None, 0.2)
        assert torch.equal(found[:, :, node], alone)


@given(
    before=PREFIXES,
    rows=st.one_of(st.integers(1, 20), st.integers(90, 210)),
    group=st.integers(1, 3),
    transposed=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 999),
)
def test_attention_in_a_chunk(kernels, before, rows, group, transposed, threads, seed):
    k, v = keys_and_values(2, before + rows, 32, transposed, seed)
    q = 3 * torch.randn(2 * group, rows, 32, generator=torch.Generator().manual_seed(seed + 1))
    torch.set_num_threads(threads)
    found = kernels.attend_chunk(q, k, v, 0.2)
    for row in {0, rows // 2, rows - 1}:
        end = before + row + 1
        alone = kernels.attend(q[:, row].view(2, group, 32), k[:, :end], v[:, :end], None, 0.2)
        assert torch.equal(found[:, row].reshape(2, group, 32), alone)


@given(
    rows=st.integers(1, 150),
    size=st.integers(1, 200),
    outs=st.integers(1, 60),
    bias=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_products(kernels, rows, size, outs, bias, threads, seed):
    g = torch.Generator().manual_seed(seed)
    x, w = torch.randn(rows, size, generator=g), torch.randn(outs, size, generator=g)
    b = torch.randn(outs, generator=g) if bias else None
    torch.set_num_threads(threads)
    together = kernels.linear(x, [(w, b)])[0]
    for row in {0, rows // 2, rows - 1}:
        assert torch.equal(kernels.linear(x[row : row + 1], [(w, b)])[0][0], together[row])
