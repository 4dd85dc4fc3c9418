"""Hybrid tree attention through torch's scaled_dot_product_attention: any device, no extra package."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from longdraft.attention import reference
from longdraft.attention.block import PLAIN, Block, Scoring


def one_text(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None = None, scale: float | None = None
) -> torch.Tensor:
    """Attends within one text: q (Hq, T, d), k and v (Hkv, n, d), seen (T, n) -> (Hq, T, d).

    The heads of a group are folded into rows, so K/V are read once per KV head.
    """
    rows = q.reshape(k.shape[0], -1, q.shape[-1])
    mask = None if seen is None else seen.repeat(q.shape[0] // k.shape[0], 1)
    return F.scaled_dot_product_attention(rows[None], k[None], v[None], attn_mask=mask, scale=scale).reshape(q.shape)


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block: Block,
    scale: float,
    scoring: Scoring = PLAIN,
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
    for b, (slot, n) in enumerate(zip(block.slots, block.lengths, strict=True)):
        end = n + block.width
        k, v = keys[slot : slot + 1, :, :end], values[slot : slot + 1, :, :end]
        if block.width > 1 and block.mask is None and block.begins is None and end == block.size:
            out[b] = F.scaled_dot_product_attention(q[b : b + 1], k, v, is_causal=True, scale=scale, enable_gqa=True)[0]
            continue
        seen = None
        if block.width > 1 or block.begins is not None:  # a single row sees everything
            seen = block.visible(b, q.device).repeat(q.shape[1] // k.shape[1], 1)
        # The heads of a group are folded into rows, so K/V are read once per KV head; the mask repeats.
        rows = q[b : b + 1].reshape(1, k.shape[1], -1, q.shape[-1])
        attended = F.scaled_dot_product_attention(rows, k, v, attn_mask=seen, scale=scale)
        out[b] = attended.reshape(out.shape[1:])
    return out
