"""Reference implementation of tree attention. Every fast path is tested against it."""

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
    """Attention to one part of the keys, with its log-sum-exp, computed in float32.

    Args:
        q: (..., Hq, T, d); k, v: (..., Hkv, n, d), Hq a multiple of Hkv.
        mask: broadcastable to (..., Hq, T, n), True where q may attend to k; None if every q attends to every k.
        modifiers: soft cap and sinks. Of several parts only one may get the sinks.

    Returns:
        o (..., Hq, T, d) and lse (..., Hq, T), both float32, d that of the values. A query that attends to nothing has
        o = 0, lse = -inf.
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
        q: (B, Hq, T, d), after RoPE.
        keys, values: (slots, Hkv, capacity, d), with the batch's own tokens written already. The head size of values
            may differ from that of keys.
        batch: slots, prefix_lens, mask and window_starts of the sequences.
        scale: the softmax scale, usually d ** -0.5.
        modifiers: soft cap and sinks of the layer.

    Returns:
        (B, Hq, T, d) in q's dtype, d that of the values.
    """
    out = q.new_empty(*q.shape[:3], values.shape[3])
    for b, (slot, n) in enumerate(zip(batch.slots, batch.prefix_lens, strict=True)):
        kv_len, mask = n + batch.tree_len, batch.full_mask(b, q.device)
        o, _ = partial_attention(q[b], keys[slot, :, :kv_len], values[slot, :, :kv_len], scale, mask, modifiers)
        out[b] = o.to(q.dtype)
    return out
