"""Hybrid tree attention on a CPU: our kernels, or torch's SDPA for inputs that they do not support.

Memory bandwidth is the limit. All query heads of a group share one KV head, so they are folded into the query rows, and
K and V are read once per KV head (native/attention.cpp). A long chain (a prefill chunk) is computed in tiles. A token
gets the same bits either way, and in a tree the bits of plain decoding.
"""

from __future__ import annotations

import torch

from longdraft import native
from longdraft.attention import sdpa
from longdraft.attention.forward_batch import NO_MODIFIERS, ForwardBatch, ScoreModifiers

# Query length (T) up to which the heads of a group are folded into the query rows.
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
    # (B, Hkv, G*T, d): row g*T + t of a KV head is query head g of its group, token t.
    folded = q.reshape(batch_size, kv_heads, heads // kv_heads * query_len, dim)
    is_tiled = batch.mask is None and not batch.tree_offset and query_len > MAX_FOLDED_QUERY_LEN
    cap, sinks = modifiers.softcap, modifiers.sinks
    out = q.new_empty(batch_size, heads, query_len, values.shape[3])
    for b, (slot, n) in enumerate(zip(batch.slots, batch.prefix_lens, strict=True)):
        k, v = (x[slot, :, : n + batch.tree_len] for x in (keys, values))
        queries = q[b] if is_tiled else folded[b]
        mask = None if is_tiled or batch.tree_len < 2 else batch.tree_mask(b, q.device)
        starts = None if batch.window_starts is None else batch.window_starts[b]
        o = kernels.attend(queries, k, v, mask, scale, prefill=is_tiled, window_start=starts, softcap=cap, sinks=sinks)
        out[b] = o.view_as(out[b])
    return out
