"""Prefix attention: every path against the reference, in both layouts of the keys."""

from __future__ import annotations

import math

import pytest
import torch
from test_attention import TOLERANCE
from test_flash_packages import installed, two  # noqa: F401  (a fixture)

from longdraft.attention import cpu, dispatch, prefix
from longdraft.attention.block import Block
from longdraft.model.runner import TargetRunner
from tests import torch_kernels
from tests.tiny import tiny_model

GQA = [(4, 4), (6, 2), (4, 1)]


def case(rows, lengths, heads=(6, 2), head_dim=16, transposed=False, dtype=torch.float32):
    """Arguments of a prefix attention. Slots are not in order, and rows that no query may see are NaN."""
    g = torch.Generator().manual_seed(rows + sum(lengths))
    q = torch.randn(len(lengths), heads[0], rows, head_dim, generator=g).to(dtype)
    slots = range(len(lengths), 0, -1)
    k, v = (torch.full((len(lengths) + 1, heads[1], max(lengths) + 5, head_dim), math.nan, dtype=dtype) for _ in "kv")
    for x in (k, v):
        for slot, n in zip(slots, lengths, strict=True):
            x[slot, :, :n] = torch.randn(heads[1], n, head_dim, generator=g).to(dtype)
    if transposed:
        k = k.transpose(-1, -2).contiguous().transpose(-1, -2)
    return q, k, v, Block.make(slots, lengths, rows), 1.3 * head_dim**-0.5


def test_the_reference_is_softmax_attention():
    q, k, v, block, scale = case(3, [11, 4])
    got = prefix.resolve("reference")(q, k, v, block, scale)
    for b, (slot, n) in enumerate(zip(block.slots, block.lengths, strict=True)):
        own_k, own_v = (x[slot, :, :n].repeat_interleave(3, dim=0) for x in (k, v))
        torch.testing.assert_close(got[b], torch.softmax(q[b] @ own_k.transpose(1, 2) * scale, -1) @ own_v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize("heads", GQA, ids=str)
@pytest.mark.parametrize("path", ["cpu", "cpu long", "cpu many rows", "sdpa", "hybrid", "flash", "triton"])
def test_every_path_is_like_the_reference(path, heads, transposed, dtype, monkeypatch, request):
    if path == "flash":
        request.getfixturevalue("installed")(flash_attn=two)
    if path in ("hybrid", "flash") and transposed:
        pytest.skip("nobody on a GPU keeps keys so")
    monkeypatch.setattr(cpu, "LONG_PREFIX", 0 if path == "cpu long" else 10**6)
    monkeypatch.setattr(cpu, "FEW_ROWS", 0 if path == "cpu many rows" else 64)
    attend = prefix.resolve(path.split()[0])
    few = [(1, [1]), (5, [33, 2])]
    with torch_kernels.registered():
        for rows, lengths in few if path == "triton" else [*few, (1, [40, 7, 41]), (16, [300])]:
            arguments = case(rows, lengths, heads, transposed=transposed, dtype=dtype)
            got, expected = attend(*arguments), prefix.resolve("reference")(*arguments)
            assert got.shape == expected.shape and got.dtype == dtype
            torch.testing.assert_close(got.float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_there_is_one_for_every_attention_path(monkeypatch):
    assert set(prefix.PATHS) == set(dispatch.PATHS)
    monkeypatch.setenv("LONGDRAFT_ATTENTION", "reference")
    assert TargetRunner(tiny_model()).prefix_attend is prefix.resolve("reference")
