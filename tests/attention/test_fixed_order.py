"""Fixed-order attention: a token has the same bits in a tree as alone, with its path as prefix."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are decorated, so before the import

from longdraft.attention import fixed_order  # noqa: E402
from longdraft.attention.forward_batch import NO_MODIFIERS, ForwardBatch, ScoreModifiers  # noqa: E402
from longdraft.errors import CapabilityError  # noqa: E402
from longdraft.native.quantized_kv import Int8KV  # noqa: E402
from tests.attention.cases import TOLERANCE, assert_like_reference, case, random_tree  # noqa: E402
from tests.support.slow_marks import slow  # noqa: E402


def by_kernel(monkeypatch):
    pytest.importorskip("triton")
    from longdraft.attention import fixed_order_kernel

    monkeypatch.setattr(fixed_order_kernel, "SPLIT", 64)
    if not CUDA:
        # numpy's product rounds a row by its place; tensor cores are taken to treat all rows alike.
        monkeypatch.setattr(np, "matmul", lambda a, b, dtype: (a.astype(dtype)[:, :, None] * b.astype(dtype)).sum(1))
    return fixed_order_kernel.fixed_order_attention


@pytest.fixture(params=["definition", "kernel"])
def attend(request, monkeypatch):
    """The reference or the kernels, as an attention path."""
    compute = fixed_order.fixed_order_attention if request.param == "definition" else by_kernel(monkeypatch)

    def path(q, keys, values, batch, scale, scoring=None):
        bound = max(batch.prefix_lens) + batch.tree_len
        rows = batch.slots_t, batch.prefix_lens_t, *fixed_order.tree_paths(batch, q.device)
        return compute(q, keys, values, *rows, bound, scale)

    return path


@pytest.mark.parametrize(("lengths", "dtype"), zip([[5, 0, 70], [63], [9]], TOLERANCE, strict=True), ids=str)
def test_fixed_order_equals_the_reference(attend, lengths, dtype):
    for arguments in (case(lengths, 4, dtype=dtype), case([9, 20], 2, dtype=dtype, tree=False, behind=3)):
        assert_like_reference(attend, *arguments, tolerance=max(1e-5, TOLERANCE[dtype]))


@pytest.mark.parametrize(("before", "dtype"), [(58, torch.float32), *(slow(n, torch.bfloat16) for n in (0, 64, 121))])
def test_a_tree_token_has_the_bits_of_plain_decoding(attend, before, dtype):
    """Each token's path is laid out behind the prefix and padded, as in plain decoding.
    Tiles and splits end within some paths."""
    size, generator = 8, torch.Generator().manual_seed(before)
    mask = random_tree(size, generator)
    mask[4:7] = torch.tril(torch.ones(size, size, dtype=torch.bool))[4:7]  # a chain of seven too
    q, keys, values, batch, scale = case([before], size, mask=mask[None], dtype=dtype)
    together = attend(q, keys, values, batch, scale)
    for i in (0, 6, 7):
        path = mask[i].nonzero().flatten()
        own = [x.clone() for x in (keys, values)]
        for x, old in zip(own, (keys, values), strict=True):
            x[batch.slots[0], :, before : before + len(path)] = old[batch.slots[0], :, before + path]
        n = before + len(path) - 1
        own = [torch.nn.functional.pad(x, (0, 0, 0, size)) for x in own]
        alone = ForwardBatch.make(batch.slots, [n], size, torch.eye(size, dtype=torch.bool)[None])
        moved = torch.cat([q[:, :, i : i + 1], torch.randn(q[:, :, 1:].shape).to(dtype)], dim=2)
        assert torch.equal(attend(moved, *own, alone, scale)[:, :, 0], together[:, :, i])


def test_other_tokens_and_upper_bounds_change_no_bits(attend):
    q, keys, values, batch, scale = case([7, 11], 4)
    expected = attend(q, keys, values, batch, scale)
    larger = torch.cat([q[:, :, :2], 100 * q[:, :, 2:]], dim=2)
    assert torch.equal(attend(larger, keys, values, batch, scale)[:, :, :2], expected[:, :, :2])
    captured = replace(batch, slots=(-1, -1), prefix_lens=(40, 40), is_captured=True)
    assert torch.equal(attend(q, keys, values, captured, scale), expected)


def test_check_batch_invariance_passes_and_finds_another_order(monkeypatch):
    fixed_order.check_batch_invariance.cache_clear()
    fixed_order.check_batch_invariance(torch.device("cpu"), torch.float32, 16, 2)
    by_rank = fixed_order.attend
    monkeypatch.setattr(fixed_order, "attend", lambda *inputs: by_rank(*inputs) + 1e-6 * inputs[3].prefix_lens[0])
    fixed_order.check_batch_invariance.cache_clear()
    with pytest.raises(CapabilityError, match="deterministic"):
        fixed_order.check_batch_invariance(torch.device("cpu"), torch.float32, 16, 2)


@pytest.mark.parametrize("rounded", [False, True])
def test_modifiers_and_int8_kv_are_refused(rounded):
    q, keys, values, batch, scale = case([5], 3)
    keys, values = (Int8KV.quantize(x) for x in (keys, values)) if rounded else (keys, values)
    with pytest.raises(CapabilityError, match="deterministic=True"):
        fixed_order.attend(q, keys, values, batch, scale, NO_MODIFIERS if rounded else ScoreModifiers(softcap=5.0))
