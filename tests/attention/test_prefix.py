"""Prefix attention: every path against the reference, in both layouts of the keys."""

from __future__ import annotations

import math

import pytest
import torch
from test_attention import TOLERANCE, flash_attn  # noqa: F401  (a fixture)

from longdraft.attention import cpu, dispatch, prefix
from longdraft.host.runner import TargetRunner
from tests.tiny import tiny_model

GQA = [(4, 4), (6, 2), (4, 1)]


def case(rows, keys, heads=(6, 2), head_dim=16, transposed=False, dtype=torch.float32):
    """Arguments of a prefix attention over a part of a larger store, whose other rows are NaN."""
    g = torch.Generator().manual_seed(rows + keys)
    q = torch.randn(heads[0], rows, head_dim, generator=g).to(dtype)
    k, v = (torch.full((2, heads[1], keys + 5, head_dim), math.nan, dtype=dtype) for _ in range(2))
    for x in (k, v):
        x[1, :, :keys] = torch.randn(heads[1], keys, head_dim, generator=g).to(dtype)
    if transposed:
        k = k.transpose(-1, -2).contiguous().transpose(-1, -2)
    return q, k[1, :, :keys], v[1, :, :keys], 1.3 * head_dim**-0.5


def test_the_reference_is_softmax_attention():
    q, k, v, scale = case(3, 11)
    k, v = (x.repeat_interleave(3, dim=0) for x in (k, v))
    expected = torch.softmax(q @ k.transpose(1, 2) * scale, -1) @ v
    torch.testing.assert_close(prefix.reference(*case(3, 11)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize("heads", GQA, ids=str)
@pytest.mark.parametrize("path", ["cpu", "cpu long", "cpu many rows", "sdpa", "flash", "triton"])
def test_every_path_is_like_the_reference(path, heads, transposed, dtype, monkeypatch, request):
    if path == "flash":
        request.getfixturevalue("flash_attn")
    monkeypatch.setattr(cpu, "LONG_PREFIX", 0 if path == "cpu long" else 10**6)
    monkeypatch.setattr(cpu, "FEW_ROWS", 0 if path == "cpu many rows" else 64)
    attend = prefix.resolve(path.split()[0])
    for rows, keys in [(1, 1), (5, 33)] if path == "triton" else [(1, 1), (1, 40), (4, 7), (16, 300)]:
        arguments = case(rows, keys, heads, transposed=transposed, dtype=dtype)
        got, expected = attend(*arguments), prefix.reference(*arguments)
        assert got.shape == expected.shape and got.dtype == dtype
        torch.testing.assert_close(got.float(), expected.float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_there_is_one_for_every_attention_path(monkeypatch):
    assert set(prefix.PATHS) == set(dispatch.PATHS)
    monkeypatch.setenv("LONGDRAFT_ATTENTION", "reference")
    assert TargetRunner(tiny_model()).prefix_attend is prefix.reference
