"""Hybrid attention beyond the contract: calls of torch's kernels, windows, captured forwards, fake GPU tensors."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from longdraft.attention import hybrid, reference
from longdraft.attention.forward_batch import ForwardBatch
from longdraft.attention.prefix import make_prefix_attention
from tests.attention.cases import TOLERANCE, assert_like_reference, case
from tests.support import torch_kernels


@pytest.fixture(autouse=True)
def kernels():
    with torch_kernels.registered():
        yield


def test_query_tokens_are_passed_as_heads_so_that_keys_are_read_once_and_split_or_as_one_causal_chain():
    """flash attention splits keys only for a sequence with one query token whose heads share keys."""
    for heads, size in [((6, 2), 7), ((6, 2), 1), ((4, 4), 1), ((4, 4), 5)]:
        hybrid.attend(*case([9, 4, 30], size, heads=heads, dtype=torch.bfloat16))
    assert [c[:3] for c in torch_kernels.calls] == [(3, 2, 1), (3, 2, 1), (3, 4, 1), (3, 4, 1)]
    size = hybrid.MIN_CAUSAL_QUERY_LEN
    for behind in (0, 3):
        assert_like_reference(hybrid.attend, *case([0, 40, 3], size, tree=False, dtype=torch.bfloat16, behind=behind))
        assert torch_kernels.calls.pop() == (3 * size, 2, size, 40 + size + behind, True)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_other_layouts(dtype):
    """The heads of a token contiguous, and one layer of a larger cache."""
    q, keys, values, batch, scale = case([11, 0, 30], 5, dtype=dtype)
    side_by_side = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (keys, values))
    assert_like_reference(hybrid.attend, q, *side_by_side, batch, scale)
    layers = (torch.stack([torch.full_like(x, math.nan), x])[1] for x in (keys, values))
    assert_like_reference(hybrid.attend, q, *layers, batch, scale)


def test_transposed_keys_are_refused():
    with pytest.raises(ValueError, match="LONGDRAFT_ATTENTION=sdpa"):
        hybrid.attend(*case([5], 3, transposed=True))


def test_window_starts_cut_the_prefix():
    """Entries [start, start + length) of a slot, and the tree behind them."""
    q, keys, values, batch, scale = case([12, 20], 4, dtype=torch.bfloat16)
    begins = torch.tensor([5, 13], dtype=torch.int32)
    places = hybrid.HybridMetadata.build(keys, batch.slots_t, batch.prefix_lens_t - begins, 20, batch.mask, begins)
    got = hybrid.attend_prefix_and_tree(q, keys, values, places, scale)
    for b, (slot, n, begin) in enumerate(zip(batch.slots, batch.prefix_lens, begins.tolist(), strict=True)):
        part = ForwardBatch.make([0], [n - begin], 4, batch.mask[b : b + 1])
        own = (x[slot : slot + 1, :, begin:] for x in (keys, values))
        expected = reference.attend(q[b : b + 1], *own, part, scale)
        torch.testing.assert_close(got[b : b + 1].float(), expected.float(), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("size", "tree"), [(1, True), (5, True), (5, False), (200, False)])
def test_no_data_of_the_gpu_is_read_by_the_host(dtype, size, tree):
    """Tensors of a GPU without storage: shapes and devices are checked, and asking for a number would be an error."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(3, size, 8, 64, dtype=dtype, device="cuda").transpose(1, 2)
        keys, values = (torch.empty(4, 2, 500, 64, dtype=dtype, device="cuda") for _ in range(2))
        slots, lengths = (torch.empty(3, dtype=torch.int32, device="cuda") for _ in range(2))
        mask = torch.empty(3, size, size, dtype=torch.bool, device="cuda") if tree else None
        batch = ForwardBatch((-1,) * 3, (300,) * 3, size, mask, slots, lengths, is_captured=True)
        found = [
            attend(q, keys, values, batch, 0.1) for attend in (hybrid.attend, make_prefix_attention(hybrid.attend))
        ]
    assert all(o.shape == q.shape and o.dtype == dtype and o.device.type == "cuda" for o in found)
