"""Hybrid tree attention through torch's scaled_dot_product_attention: any device, no extra package."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from longdraft.attention import reference
from longdraft.attention.forward_batch import NO_MODIFIERS, ForwardBatch, ScoreModifiers


def attend_sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, scale: float | None = None
) -> torch.Tensor:
    """Attends within one text: q (Hq, T, d), k and v (Hkv, n, d), seen (T, n) -> (Hq, T, size of v).

    The heads of a group are folded into rows, so K/V are read once per KV head. k and v may be of another dtype.
    """
    rows = q.reshape(k.shape[0], -1, q.shape[-1])
    mask = None if mask is None else mask.repeat(q.shape[0] // k.shape[0], 1)
    k, v = (_by_row(x.to(q.dtype))[None] for x in (k, v))
    out = F.scaled_dot_product_attention(rows[None], k, v, attn_mask=mask, scale=scale)
    return out.reshape(*q.shape[:2], v.shape[-1])


def _by_row(x: torch.Tensor) -> torch.Tensor:
    """torch's fused kernels read keys and values by row."""
    return x if x.stride(-1) == 1 else x.contiguous()


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block: ForwardBatch,
    scale: float,
    scoring: ScoreModifiers = NO_MODIFIERS,
    /,
) -> torch.Tensor:
    """Same contract as :func:`longdraft.attention.reference.attend`.

    Prefix, earlier tree rows and block are contiguous, so one call covers all of them. A single row, or a chain without
    a prefix, needs no mask and keeps torch's fused kernels with grouped K/V; other blocks use a boolean mask. Soft
    caps and sinks, which torch's function does not know, are computed by the definition.
    """
    if scoring.softcap is not None or scoring.sinks is not None:
        return reference.attend(q, keys, values, block, scale, scoring)
    out = q.new_empty(*q.shape[:3], values.shape[3])
    for b, (slot, n) in enumerate(zip(block.slots, block.prefix_lens, strict=True)):
        end = n + block.tree_len
        k, v = keys[slot, :, :end], values[slot, :, :end]
        if block.tree_len > 1 and block.mask is None and block.window_starts is None and end == block.query_len:
            k, v = (_by_row(x.to(q.dtype))[None] for x in (k, v))
            out[b] = F.scaled_dot_product_attention(q[b : b + 1], k, v, is_causal=True, scale=scale, enable_gqa=True)[0]
            continue
        # A single row sees everything.
        seen = block.full_mask(b, q.device) if block.tree_len > 1 or block.window_starts is not None else None
        out[b] = attend_sequence(q[b], k, v, seen, scale)
    return out
