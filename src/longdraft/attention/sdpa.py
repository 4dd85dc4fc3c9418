"""Computes tree attention with torch's scaled_dot_product_attention (SDPA), on any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from longdraft.attention import reference
from longdraft.attention.forward_batch import NO_MODIFIERS, ForwardBatch, ScoreModifiers


def attend_sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, scale: float | None = None
) -> torch.Tensor:
    """Attends for one sequence: q (Hq, T, d), k and v (Hkv, n, d), mask (T, n). Returns (Hq, T, head size of v).

    The query heads that share a KV head are folded into rows, so k and v are read once for each KV head. k and v may
    have another dtype than q.
    """
    folded = q.reshape(k.shape[0], -1, q.shape[-1])
    mask = None if mask is None else mask.repeat(q.shape[0] // k.shape[0], 1)
    k, v = (_row_contiguous(x.to(q.dtype))[None] for x in (k, v))
    out = F.scaled_dot_product_attention(folded[None], k, v, attn_mask=mask, scale=scale)
    return out.reshape(*q.shape[:2], v.shape[-1])


def _row_contiguous(x: torch.Tensor) -> torch.Tensor:
    """Makes x contiguous in d, the last dimension, as torch's fused kernels require."""
    return x if x.stride(-1) == 1 else x.contiguous()


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: ForwardBatch,
    scale: float,
    modifiers: ScoreModifiers = NO_MODIFIERS,
    /,
) -> torch.Tensor:
    """Same contract as :func:`longdraft.attention.reference.attend`.

    Prefix and tree of a sequence are adjacent in the cache, so one call covers both. A single token, or a chain without
    a prefix, needs no mask, so torch can use its fused kernels. Other batches need a boolean mask. The reference
    computes layers with a soft cap or sinks, which SDPA does not support.
    """
    if modifiers.softcap is not None or modifiers.sinks is not None:
        return reference.attend(q, keys, values, batch, scale, modifiers)
    out = q.new_empty(*q.shape[:3], values.shape[3])
    for b, (slot, prefix_len) in enumerate(zip(batch.slots, batch.prefix_lens, strict=True)):
        kv_len = prefix_len + batch.tree_len
        k, v = keys[slot, :, :kv_len], values[slot, :, :kv_len]
        if batch.tree_len > 1 and batch.mask is None and batch.window_starts is None and kv_len == batch.query_len:
            k, v = (_row_contiguous(x.to(q.dtype))[None] for x in (k, v))
            out[b] = F.scaled_dot_product_attention(q[b : b + 1], k, v, is_causal=True, scale=scale, enable_gqa=True)[0]
            continue
        # A single token attends to everything.
        mask = batch.full_mask(b, q.device) if batch.tree_len > 1 or batch.window_starts is not None else None
        out[b] = attend_sequence(q[b], k, v, mask, scale)
    return out
