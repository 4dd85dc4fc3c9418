"""The tree's part of hybrid attention and its merge with the prefix's as one operator, ``longdraft::merge_tree_attention``.

In torch's own operators it takes fourteen launches a layer. :func:`merge_tree_attention` is the definition, which serves where the
kernel (:mod:`.tree_attention_kernel`) does not.

Rows of the cache are numbered as one list of all rows of all slots, in which the rows of a KV head overlap with those
of the others.
"""

from __future__ import annotations

import functools
import logging

import torch

from longdraft.attention import custom_ops
from longdraft.errors import reason_of

log = logging.getLogger("longdraft")

# Largest difference, relative to the largest output, between the kernel and the definition.
_TOLERANCE = {torch.float16: 0.01, torch.bfloat16: 0.05}


def slot_stride(keys: torch.Tensor) -> int:
    """Distance between two slots in the list of :func:`flatten_kv`."""
    step, row = keys.stride(0), keys.stride(2)
    if keys.stride(3) != 1 or step % row:
        raise ValueError(f"hybrid attention cannot read keys laid out by {keys.stride()}; set LONGDRAFT_ATTENTION=sdpa")
    return step // row


def flatten_kv(cache: torch.Tensor) -> torch.Tensor:
    """(slots, Hkv, capacity, d) as a list of rows (N, Hkv, d), which overlap between heads."""
    slots, kv_heads, capacity, d = cache.shape
    size = (slots - 1) * slot_stride(cache) + capacity
    return cache.as_strided((size, kv_heads, d), (cache.stride(2), cache.stride(1), 1))


def merge_tree_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    tree_indices: torch.Tensor,
    tree_bias: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention to a prefix, which is known, and to the tree behind it.

    Args:
        q: (B, Hq, T, d).
        keys, values: (slots, Hkv, capacity, d); numbers of a row lie side by side.
        o, lse: (B, Hq, T, d) and (B, Hq, T) float32 of the prefix; 0 and -inf for an empty one.
        tree_indices: (B*W,) int32, the tree's rows in the list of :func:`flatten_kv`.
        tree_bias: (B, 1, 1, T, W) float32, -inf where row i may not see row j of the tree, else 0.

    Returns:
        (B, Hq, T, d) in q's dtype, in memory (B, T, Hq, d).
    """
    (batch, heads, size, d), kv_heads, width = q.shape, keys.shape[1], tree_bias.shape[-1]
    group = heads // kv_heads
    k, v = (flatten_kv(x).index_select(0, tree_indices).view(batch, width, kv_heads, d).float() for x in (keys, values))
    scores = q.float().reshape(batch, kv_heads, group * size, d) @ k.permute(0, 2, 3, 1)
    scores = torch.add(tree_bias, scores.view(batch, kv_heads, group, size, width), alpha=scale)
    scores = torch.cat([scores, lse.reshape(batch, kv_heads, group, size, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1).view(batch, kv_heads, group * size, width + 1)
    of_tree, of_prefix = weights.split([width, 1], dim=-1)
    out = of_tree @ v.transpose(1, 2) + of_prefix * o.reshape(batch, kv_heads, group * size, d)
    out = out.view(q.shape).transpose(1, 2)
    return out.to(q.dtype, copy=True, memory_format=torch.contiguous_format).transpose(1, 2)


custom_ops.define_op(merge_tree_attention, "longdraft.attention.tree_attention_kernel")


def uses_kernel(q: torch.Tensor, keys: torch.Tensor) -> bool:
    """True if the operator computes it, in 16 bits on a GPU where that works; else the definition does.

    float32 is for checks, and its exact products take minutes to compile.
    """
    if q.device.type != "cuda" or q.element_size() != 2 or not custom_ops.triton_enabled():
        return False
    return _works(q.device, q.dtype, q.shape[3], q.shape[1] // keys.shape[1])


@functools.cache
def _works(device: torch.device, dtype: torch.dtype, d: int, group: int) -> bool:
    """True if the operator gives what its definition gives, on made-up rows. Waits for the device, the first time."""
    batch, kv_heads, size, prefix = 2, 2, 5, (9, 10)
    keys, values = torch.randn(2, batch, kv_heads, 24, d, dtype=dtype, device=device)
    q, o = torch.randn(2, batch, kv_heads * group, size, d, dtype=dtype, device=device)
    lse = torch.randn(batch, kv_heads * group, size, device=device, dtype=torch.float32)
    places = [slot * slot_stride(keys) + n + j for slot, n in enumerate(prefix) for j in range(size)]
    tree = torch.tensor(places, dtype=torch.int32, device=device)
    hidden = torch.full((batch, 1, 1, size, size), float("-inf"), device=device, dtype=torch.float32).triu(1)
    try:
        given = q, keys, values, o, lse, tree, hidden, d**-0.5
        found, expected = (
            compute(*given).float() for compute in (torch.ops.longdraft.merge_tree_attention, merge_tree_attention)
        )
        if bool((found - expected).abs().max() <= _TOLERANCE[dtype] * expected.abs().max()):
            return True
        reason = "its results differ"
    except Exception as error:  # a compiler or a driver can raise any type
        reason = reason_of(error)
    log.warning("Attention to trees runs on torch's operators, not on one kernel: %s.", reason)
    return False
