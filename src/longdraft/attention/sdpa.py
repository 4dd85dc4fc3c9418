"""Hybrid tree attention through torch's scaled_dot_product_attention: any device, no extra package."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from longdraft.attention.block import Block


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block: Block, scale: float) -> torch.Tensor:
    """Same contract as :func:`longdraft.attention.reference.attend`.

    Prefix, earlier tree rows and block are contiguous, so one call covers all of them. A single row, or a chain without
    a prefix, needs no mask and keeps torch's fused kernels with grouped K/V; other blocks use a boolean mask.
    """
    out = torch.empty_like(q)
    for b, (slot, n) in enumerate(zip(block.slots, block.lengths, strict=True)):
        end = n + block.width
        k, v = keys[slot : slot + 1, :, :end], values[slot : slot + 1, :, :end]
        if block.width > 1 and block.mask is None and end == block.size:
            out[b] = F.scaled_dot_product_attention(q[b : b + 1], k, v, is_causal=True, scale=scale, enable_gqa=True)[0]
            continue
        seen = None
        if block.width > 1:  # a single row sees everything
            seen = torch.ones(block.size, end, dtype=torch.bool, device=q.device)
            seen[:, n:] = block.block_mask(b, q.device)
            seen = seen.repeat(q.shape[1] // k.shape[1], 1)
        # The heads of a group are folded into rows, so K/V are read once per KV head; the mask repeats.
        rows = q[b : b + 1].reshape(1, k.shape[1], -1, q.shape[-1])
        attended = F.scaled_dot_product_attention(rows, k, v, attn_mask=seen, scale=scale)
        out[b] = attended.reshape(q.shape[1:])
    return out
