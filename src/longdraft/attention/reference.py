"""Computes tree attention in a simple way. Tests compare every fast path with this reference."""

from __future__ import annotations

from typing import Protocol

import torch

from longdraft.attention.forward_batch import NO_MODIFIERS, ForwardBatch, ScoreModifiers


class AttentionFunction(Protocol):
    """The interface of every path, documented at :func:`attend`."""

    def __call__(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: ForwardBatch,
        scale: float,
        modifiers: ScoreModifiers = NO_MODIFIERS,
        /,
    ) -> torch.Tensor: ...


def partial_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None = None,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends to a part of the keys, in float32. The log-sum-exp (lse) allows to merge the results of several parts.

    Args:
        q: (..., Hq, T, d), T queries of Hq heads.
        k, v: (..., Hkv, n, d), n keys and values of Hkv KV heads. Hq is a multiple of Hkv.
        mask: broadcastable to (..., Hq, T, n), True where a query attends to a key; None if all attend to all.
        modifiers: soft cap and sinks. Only one of several parts may get the sinks.

    Returns:
        Float32 output (..., Hq, T, d of the values) and lse (..., Hq, T); 0 and -inf for a query without any key.
    """
    group = q.shape[-3] // k.shape[-3]
    k = k.float().repeat_interleave(group, dim=-3)
    v = v.float().repeat_interleave(group, dim=-3)
    scores = (q.float() @ k.transpose(-1, -2)) * scale
    if modifiers.softcap is not None:
        scores = torch.tanh(scores / modifiers.softcap) * modifiers.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    if modifiers.sinks is not None:
        lse = torch.logaddexp(lse, modifiers.sinks.float().unsqueeze(-1).expand_as(lse))
    # exp(-inf - -inf) is NaN: a fully masked query gets weight zero instead.
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1))
    return weights @ v, lse


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: ForwardBatch,
    scale: float,
    modifiers: ScoreModifiers = NO_MODIFIERS,
    /,
) -> torch.Tensor:
    """Computes tree attention: each new token attends to its prefix, and to its tree under the mask.

    Args:
        q: (B, Hq, T, d), after RoPE: B sequences, Hq query heads, T new tokens.
        keys, values: the KV cache (slots, Hkv, capacity, d), with the new tokens. Values may have another head size.
        batch: the sequences' slots, prefix_lens, mask and window_starts.
        scale: the softmax scale, usually d ** -0.5.
        modifiers: soft cap and sinks of the layer.

    Returns:
        (B, Hq, T, d of the values) in q's dtype.
    """
    out = q.new_empty(*q.shape[:3], values.shape[3])
    for b, (slot, prefix_len) in enumerate(zip(batch.slots, batch.prefix_lens, strict=True)):
        kv_len, mask = prefix_len + batch.tree_len, batch.full_mask(b, q.device)
        o, _ = partial_attention(q[b], keys[slot, :, :kv_len], values[slot, :, :kv_len], scale, mask, modifiers)
        out[b] = o.to(q.dtype)
    return out
