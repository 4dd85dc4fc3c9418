"""merge_tree_attention: kernel and torch implementation against the reference."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from longdraft.attention import reference, tree_attention, tree_attention_kernel
from longdraft.attention.hybrid import HybridMetadata
from tests.attention.cases import TOLERANCE, case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE_OF = TOLERANCE | {torch.float32: 1e-5}
DTYPES = torch.float32, torch.bfloat16, torch.float16


def arguments(lengths, size, **over):
    """Arguments of merge_tree_attention, and the reference's attention to prefix and tree."""
    q, keys, values, batch, scale = case(lengths, size, device=DEVICE, **over)
    mask = torch.stack([batch.tree_mask(b, q.device) for b in range(batch.batch_size)])
    o, lse = torch.zeros_like(q), q.new_zeros(q.shape[:3], dtype=torch.float32)
    for b, (slot, n) in enumerate(zip(batch.slots, batch.prefix_lens, strict=True)):
        found = reference.partial_attention(q[b], keys[slot, :, :n], values[slot, :, :n], scale)
        o[b], lse[b] = found[0].to(q.dtype), found[1]
    places = HybridMetadata.build(keys, batch.slots_t, batch.prefix_lens_t, max(lengths), mask)
    whole = reference.attend(q, keys, values, batch, scale)
    empty = batch.prefix_lens_t == 0
    o[empty], lse[empty] = float("nan"), float("inf")  # a kernel's results for an empty prefix are undefined
    return (q, keys, values, o, lse, batch.prefix_lens_t, places.tree_indices, places.tree_bias, scale), whole


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lengths", "size", "over"),
    [
        ([30, 0, 7], 5, {"heads": (6, 2), "head_dim": 16}),
        ([9], 40, {"heads": (4, 4), "head_dim": 24}),
        ([12, 3], 3, {"heads": (4, 1), "head_dim": 32, "behind": 70}),
    ],
    ids=str,
)
def test_kernel_and_reference_equal_attention_to_prefix_and_tree(dtype, lengths, size, over):
    given, whole = arguments(lengths, size, dtype=dtype, **over)
    for found in (tree_attention_kernel.merge_tree_attention(*given), tree_attention.merge_tree_attention(*given)):
        assert found.dtype == dtype and found.transpose(1, 2).is_contiguous()  # as the next product reads it
        tolerance = TOLERANCE_OF[dtype]
        torch.testing.assert_close(found.float(), whole.float(), atol=tolerance, rtol=tolerance)
