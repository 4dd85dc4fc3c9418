"""Computes tree attention on a CPU with our kernels, or with torch's SDPA for inputs that our kernels do not support.

Memory bandwidth is the limit. So the G = Hq / Hkv query heads that share a KV head are folded into the query rows, and
K and V are read once per KV head (native/attention.cpp). A long chain, such as a prefill chunk, is computed in tiles. A
token's bits depend neither on folding or tiling, nor on the other tokens of the tree.
"""

from __future__ import annotations

import torch

from longdraft import native
from longdraft.attention import sdpa
from longdraft.attention.forward_batch import NO_MODIFIERS, ForwardBatch, ScoreModifiers

# The longest chain whose heads are folded; longer chains are tiled.
MAX_FOLDED_QUERY_LEN = 96


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: ForwardBatch,
    scale: float,
    modifiers: ScoreModifiers = NO_MODIFIERS,
    /,
) -> torch.Tensor:
    """Same contract as :func:`longdraft.attention.reference.attend`."""
    kernels = native.kernels()
    if kernels is None or not native.supports_attention(q, keys[0], values[0]):
        return sdpa.attend(q, keys, values, batch, scale, modifiers)
    batch_size, heads, query_len, dim = q.shape
    kv_heads = keys.shape[1]
    # (batch_size, kv_heads, G * query_len, dim): row g * query_len + t of a KV head is its query head g, token t.
    folded = q.reshape(batch_size, kv_heads, heads // kv_heads * query_len, dim)
    is_tiled = batch.mask is None and not batch.tree_offset and query_len > MAX_FOLDED_QUERY_LEN
    softcap, sinks = modifiers.softcap, modifiers.sinks
    out = q.new_empty(batch_size, heads, query_len, values.shape[3])
    for b, (slot, prefix_len) in enumerate(zip(batch.slots, batch.prefix_lens, strict=True)):
        k, v = (cache[slot, :, : prefix_len + batch.tree_len] for cache in (keys, values))
        rows = q[b] if is_tiled else folded[b]
        mask = None if is_tiled or batch.tree_len < 2 else batch.tree_mask(b, q.device)
        # First entries besides a window need tiles; without tiles a few tokens see everything.
        starts = batch.window_starts if is_tiled or not batch.num_first else None
        start = None if starts is None else starts[b]
        o = kernels.attend(
            rows, k, v, mask, scale, prefill=is_tiled, window_start=start, num_first=batch.num_first,
            softcap=softcap, sinks=sinks,
        )  # fmt: skip
        out[b] = o.view_as(out[b])
    return out
