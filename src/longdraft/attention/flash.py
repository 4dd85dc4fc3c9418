"""Hybrid tree attention with flash-attn: its kernel over the prefix, the tree part beside it, merged by LSE."""

from __future__ import annotations

import torch

from longdraft.attention.block import Block
from longdraft.attention.reference import merge, partial_attention


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block: Block, scale: float) -> torch.Tensor:
    """Same contract as :func:`longdraft.attention.reference.attend`; float16 and bfloat16 on a GPU."""
    from flash_attn import flash_attn_func

    out = torch.empty_like(q)
    for b, (slot, n) in enumerate(zip(block.slots, block.lengths, strict=True)):
        end = n + block.width
        k, v = keys[slot, :, :end], values[slot, :, :end]
        if block.mask is None:
            # flash-attn aligns its causal mask to the lower right: a chain behind a prefix is one call.
            o = flash_attn_func(*_rows(q[b], k, v), softmax_scale=scale, causal=True)
            out[b] = o[0].transpose(0, 1)
            continue
        tree, tree_lse = partial_attention(q[b], k[:, n:], v[:, n:], scale, block.mask[b])
        if n == 0:
            out[b] = tree.to(q.dtype)
            continue
        prefix, prefix_lse, _ = flash_attn_func(
            *_rows(q[b], k[:, :n], v[:, :n]), softmax_scale=scale, causal=False, return_attn_probs=True
        )
        o, _ = merge([prefix[0].transpose(0, 1), tree], [prefix_lse[0], tree_lse])
        out[b] = o.to(q.dtype)
    return out


def _rows(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """(H, n, d) -> (1, n, H, d), the order flash-attn wants."""
    return [t.transpose(0, 1)[None] for t in tensors]
