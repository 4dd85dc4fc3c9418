"""Keys and values in bfloat16 and int8: read for what they stand for, to the same bits whoever is beside a row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft import native
from longdraft.attention import cpu, prefix
from longdraft.attention.block import Block, Scoring
from longdraft.attention.reference import attend, partial_attention
from longdraft.native.scaled import KeptRows, Scaled
from tests.native.levels import LEVELS
from tests.native.test_bits import PREFIXES, random_tree

DTYPES = [torch.bfloat16, torch.int8]


def turned(x: torch.Tensor) -> torch.Tensor:
    """As keys lie."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def packed(dtype: torch.dtype, *shape: int, seed: int) -> tuple[KeptRows, KeptRows]:
    """Random keys and values (..., n, d), rows of very different sizes."""
    g = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(*shape, generator=g) * torch.rand(*shape[:-1], 1, generator=g) for _ in range(2))
    if dtype != torch.int8:
        return turned(k.to(dtype)), v.to(dtype)
    k, v = Scaled.of(k), Scaled.of(v)
    return Scaled(turned(k.numbers), k.scales), v


def rows_of(x: KeptRows, rows: torch.Tensor, keys: bool) -> KeptRows:
    own = x.index_select(1, rows)
    if not keys:
        return own
    return turned(own) if isinstance(own, torch.Tensor) else Scaled(turned(own.numbers), own.scales)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=15)
@given(
    before=PREFIXES,
    size=st.one_of(st.integers(1, 24), st.integers(120, 140)),
    group=st.integers(1, 3),
    d=st.sampled_from([16, 48, 64]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_attention(kernels, dtype, before, size, group, d, threads, seed):
    """In a tree and in a chunk of a prompt; a row's bits are those that it gets alone."""
    torch.set_num_threads(threads)
    _, tree = random_tree(size, seed)
    k, v = packed(dtype, 2, before + size, d, seed=seed)
    q = 3 * torch.randn(2 * group, size, d, generator=torch.Generator().manual_seed(seed))
    found = kernels.attend(q.view(2, -1, d), k, v, tree, 0.2).view_as(q)
    floats = [x.to(torch.float32) for x in (k, v)]
    seen = torch.cat([torch.ones(size, before, dtype=torch.bool), tree], 1)
    torch.testing.assert_close(found, partial_attention(q, *floats, 0.2, seen)[0], rtol=2e-5, atol=2e-5)

    chunk = kernels.attend_chunk(q, k, v, 0.2)
    causal = torch.ones(size, before + size, dtype=torch.bool).tril(before)
    torch.testing.assert_close(chunk, partial_attention(q, *floats, 0.2, causal)[0], rtol=2e-5, atol=2e-5)

    begins = torch.arange(before, before + size).sub(20).clamp(min=0).int()
    chunk = kernels.attend_chunk(q, k, v, 0.2, begins=begins, softcap=2.0)
    causal &= torch.arange(before + size) >= begins[:, None]
    scoring = Scoring(softcap=2.0)
    torch.testing.assert_close(chunk, partial_attention(q, *floats, 0.2, causal, scoring)[0], rtol=2e-5, atol=2e-5)

    for node in {0, size // 2, size - 1}:
        rows = torch.cat([torch.arange(before), before + tree[node].nonzero()[:, 0]])
        own = [rows_of(x, rows, keys) for x, keys in ((k, True), (v, False))]
        assert torch.equal(kernels.attend(q[:, node].view(2, group, d), *own, None, 0.2).view(-1, d), found[:, node])


@pytest.mark.parametrize("native_kernels", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_paths_read_them_with_and_without_kernels(dtype, native_kernels, monkeypatch):
    monkeypatch.setenv("LONGDRAFT_NATIVE", "1" if native_kernels else "0")
    k, v = packed(dtype, 2, 2, 300, 32, seed=0)
    floats = [x.to(torch.float32) for x in (k, v)]
    for size in (1, 5, 100):
        q, block = torch.randn(2, 4, size, 32), Block.make([1, 0], [200, 150], size, None)
        torch.testing.assert_close(
            cpu.attend(q, k, v, block, 0.2), attend(q, *floats, block, 0.2), rtol=1e-4, atol=1e-4
        )
        wanted = prefix.PATHS["reference"](q, *floats, block, 0.2)
        torch.testing.assert_close(prefix.PATHS["cpu"](q, k, v, block, 0.2), wanted, rtol=1e-4, atol=1e-4)


def test_what_eight_bits_say():
    rows = torch.tensor([[0.0, 0, 0], [1.27, -0.5, 0.004], [3e38, -1, 0], [float("nan"), 1, 1], [float("inf"), 1, 1]])
    found = Scaled.of(rows)
    assert found.numbers[:3].tolist() == [[0, 0, 0], [127, -50, 0], [127, 0, 0]]
    assert not found.to(torch.float32)[3:, 0].isfinite().any()
    x = torch.randn(50, 64)
    assert bool(((Scaled.of(x).to(torch.float32) - x).abs() <= x.abs().amax(-1, keepdim=True) / 254 * 1.0001).all())


@pytest.mark.skipif(not LEVELS, reason=f"no kernels here: {native.missing()}")
def test_keys_that_do_not_lie_transposed_are_not_for_kernels():
    k, v = packed(torch.bfloat16, 2, 20, 16, seed=0)
    q = torch.randn(2, 3, 16)
    assert native.fits(q, k, v) and not native.fits(q, k.contiguous(), v) and not native.fits(q.bfloat16(), k, v)
    assert not native.fits(q, k, v.float())
