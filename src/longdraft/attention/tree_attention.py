"""Defines the operator ``longdraft::merge_tree_attention``: it attends to the tree, and merges the prefix's result.

One kernel (:mod:`.tree_attention_kernel`) replaces fourteen launches of torch's operators in each layer. The reference
below, :func:`merge_tree_attention`, runs where the kernel cannot.

Shapes: B sequences, T new tokens each, W tokens in each tree, Hq query heads, Hkv KV heads, head size d.
"""

from __future__ import annotations

import functools
import logging
from itertools import islice

import torch

from longdraft.attention import custom_ops
from longdraft.native.boundary import CPU_FLOAT32

logger = logging.getLogger("longdraft")


def slot_stride(keys: torch.Tensor) -> int:
    """Returns the distance between two slots in the list of :func:`flatten_kv`, in entries."""
    slot, entry = keys.stride(0), keys.stride(2)
    if keys.stride(3) != 1 or slot % entry:
        raise ValueError(f"hybrid attention cannot read keys of strides {keys.stride()}; set LONGDRAFT_ATTENTION=sdpa")
    return slot // entry


def flatten_kv(cache: torch.Tensor) -> torch.Tensor:
    """Views a cache (slots, Hkv, capacity, d) as one flat list of the entries of all slots, (entries, Hkv, d)."""
    slots, kv_heads, capacity, d = cache.shape
    num_entries = (slots - 1) * slot_stride(cache) + capacity
    return cache.as_strided((num_entries, kv_heads, d), (cache.stride(2), cache.stride(1), 1))


def merge_tree_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    prefix_lens: torch.Tensor,
    tree_indices: torch.Tensor,
    tree_bias: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attends to the tree, and merges the result with the result for the prefix.

    Args:
        q: (B, Hq, T, d).
        keys, values: the KV cache (slots, Hkv, capacity, d), contiguous in d.
        o, lse: output (B, Hq, T, d) and log-sum-exp (B, Hq, T), float32, of the attention to the prefix; undefined if
            the prefix is empty.
        prefix_lens: (B,) int32.
        tree_indices: (B*W,) int32, indices of the tree's entries in the list of :func:`flatten_kv`.
        tree_bias: (B, 1, 1, T, W) float32, -inf where token i may not attend to tree token j, else 0.

    Returns:
        (B, Hq, T, d) in q's dtype, laid out in memory as (B, T, Hq, d).
    """
    (batch_size, heads, query_len, d), kv_heads, tree_len = q.shape, keys.shape[1], tree_bias.shape[-1]
    group, empty = heads // kv_heads, (prefix_lens == 0).view(-1, 1, 1)
    o, lse = o.masked_fill(empty.unsqueeze(-1), 0), lse.masked_fill(empty, float("-inf"))
    k, v = (flatten_kv(x).index_select(0, tree_indices).float() for x in (keys, values))
    k, v = (x.view(batch_size, tree_len, kv_heads, d) for x in (k, v))
    scores = q.float().reshape(batch_size, kv_heads, group * query_len, d) @ k.permute(0, 2, 3, 1)
    scores = torch.add(tree_bias, scores.view(batch_size, kv_heads, group, query_len, tree_len), alpha=scale)
    scores = torch.cat([scores, lse.reshape(batch_size, kv_heads, group, query_len, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1).view(batch_size, kv_heads, group * query_len, tree_len + 1)
    tree_weights, prefix_weights = weights.split([tree_len, 1], dim=-1)
    out = tree_weights @ v.transpose(1, 2) + prefix_weights * o.reshape(batch_size, kv_heads, group * query_len, d)
    out = out.view(q.shape).transpose(1, 2)
    return out.to(q.dtype, copy=True, memory_format=torch.contiguous_format).transpose(1, 2)


custom_ops.define_op(merge_tree_attention, "longdraft.attention.tree_attention_kernel")


def uses_kernel(q: torch.Tensor, keys: torch.Tensor) -> bool:
    """True if the Triton kernel runs, not the reference: in 16 bits, on a GPU where the kernel's results are right.

    The kernel would take minutes to compile in float32, which is for tests.
    """
    if q.device.type != "cuda" or q.element_size() != 2 or not custom_ops.triton_enabled():
        return False
    return _kernel_matches(q.device, q.dtype, q.shape[3], q.shape[1] // keys.shape[1])


@functools.cache
def _kernel_matches(device: torch.device, dtype: torch.dtype, d: int, group: int) -> bool:
    """True if the kernel agrees with the reference on random tensors. The first call waits for the device."""
    batch_size, kv_heads, query_len, prefix_lens, capacity = 2, 2, 5, (9, 10), 24  # any small sizes
    generator = torch.Generator().manual_seed(0)  # the user's generators stay as they are
    kv_shape, q_shape = (batch_size, kv_heads, capacity, d), (batch_size, kv_heads * group, query_len, d)
    shapes = kv_shape, kv_shape, q_shape, q_shape, q_shape[:3]
    numbers = (torch.randn(shape, generator=generator, **CPU_FLOAT32).to(device) for shape in shapes)
    keys, values, q, o = (x.to(dtype) for x in islice(numbers, 4))
    lse = next(numbers)
    indices = [slot * slot_stride(keys) + n + j for slot, n in enumerate(prefix_lens) for j in range(query_len)]
    tree_indices = torch.tensor(indices, dtype=torch.int32, device=device)
    shape = (batch_size, 1, 1, query_len, query_len)
    tree_bias = torch.full(shape, float("-inf"), device=device, dtype=torch.float32).triu(1)
    lens = torch.tensor(prefix_lens, dtype=torch.int32, device=device)
    arguments = q, keys, values, o, lse, lens, tree_indices, tree_bias, d**-0.5
    reason = custom_ops.mismatch_reason(merge_tree_attention, arguments)
    if reason is not None:
        logger.warning("Attention to trees runs on torch's operators, not on one kernel: %s.", reason)
    return reason is None
