"""Hybrid tree attention on a CPU by our own kernels, or by torch's where these do not serve.

Memory traffic is the limit. All query heads of a group see the same prefix, so they are folded into rows, and K and V
are read once per KV head (native/attention.cpp). A long chain (a piece of a prompt) is computed in tiles. Both give a
row the same bits, and in a tree the bits that it would get alone.
"""

from __future__ import annotations

import torch

from longdraft import native
from longdraft.attention import sdpa
from longdraft.attention.forward_batch import NO_MODIFIERS, ForwardBatch, ScoreModifiers

# Query rows (T) up to which heads are folded into rows.
FEW_ROWS = 96


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block: ForwardBatch,
    scale: float,
    scoring: ScoreModifiers = NO_MODIFIERS,
    /,
) -> torch.Tensor:
    """Same contract as :func:`longdraft.attention.reference.attend`."""
    kernels = native.kernels()
    if kernels is None or not native.supports_attention(q, keys[0], values[0]):
        return sdpa.attend(q, keys, values, block, scale, scoring)
    batch, heads, size, dim = q.shape
    kv_heads = keys.shape[1]
    # (B, Hkv, G*T, d): row g*T + t of a KV head is query head g of its group, block row t.
    folded = q.reshape(batch, kv_heads, heads // kv_heads * size, dim)
    chain = block.mask is None and not block.tree_offset
    out = q.new_empty(batch, heads, size, values.shape[3])
    for b, (slot, n) in enumerate(zip(block.slots, block.prefix_lens, strict=True)):
        k, v = (x[slot, :, : n + block.tree_len] for x in (keys, values))
        whole = chain and size > FEW_ROWS
        rows, tree = (
            (q[b], None) if whole else (folded[b], None if block.tree_len < 2 else block.tree_mask(b, q.device))
        )
        begins, cap, sinks = (
            None if block.window_starts is None else block.window_starts[b],
            scoring.softcap,
            scoring.sinks,
        )
        own = kernels.attend(rows, k, v, tree, scale, prefill=whole, window_start=begins, softcap=cap, sinks=sinks)
        out[b] = own.view_as(out[b])
    return out
