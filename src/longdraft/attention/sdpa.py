"""Hybrid tree attention through torch's scaled_dot_product_attention: any device, no extra package."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from longdraft.attention.block import Block


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block: Block, scale: float) -> torch.Tensor:
    """Same contract as :func:`longdraft.attention.reference.attend`.

    Prefix, earlier rows of the tree and block lie together, so one call over all does. A single row, or a chain on
    nothing, needs no mask and keeps torch's fused kernels with grouped K/V; a block takes a boolean mask.
    """
    out = torch.empty_like(q)
    for b, (slot, n) in enumerate(zip(block.slots, block.lengths, strict=True)):
        end = n + block.width
        k, v = keys[slot : slot + 1, :, :end], values[slot : slot + 1, :, :end]
        if block.width == 1:
            # One row sees all: fold the group's heads into rows and K/V are read once per KV head.
            rows = q[b : b + 1].reshape(1, k.shape[1], -1, q.shape[-1])
            out[b] = F.scaled_dot_product_attention(rows, k, v, scale=scale).reshape(q.shape[1:])
        elif block.mask is None and end == block.size:
            out[b] = F.scaled_dot_product_attention(q[b : b + 1], k, v, is_causal=True, scale=scale, enable_gqa=True)[0]
        else:
            seen = torch.ones(block.size, end, dtype=torch.bool, device=q.device)
            seen[:, n:] = block.block_mask(b, q.device)
            # Folding the heads of a group into rows works under a mask too: it repeats once a head.
            group = q.shape[1] // k.shape[1]
            rows = q[b : b + 1].reshape(1, k.shape[1], -1, q.shape[-1])
            out[b] = F.scaled_dot_product_attention(rows, k, v, attn_mask=seen.repeat(group, 1), scale=scale).reshape(
                q.shape[1:]
            )
    return out
