"""Plain attention: the definition against which every fast path is tested."""

from __future__ import annotations

from typing import Protocol

import torch

from longdraft.attention.forward_batch import NO_MODIFIERS, ForwardBatch, ScoreModifiers


class AttentionFunction(Protocol):
    """The contract of every path, as :func:`attend` documents it."""

    def __call__(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        block: ForwardBatch,
        scale: float,
        scoring: ScoreModifiers = NO_MODIFIERS,
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
    """Attention over one part of the keys, with its log-sum-exp, computed in float32.

    Args:
        q: (..., Hq, T, d); k, v: (..., Hkv, n, d), Hq a multiple of Hkv.
        mask: broadcastable to (..., Hq, T, n), True where q may see k; None if every q sees every k.
        modifiers: its sinks count in this part, so only one of several parts takes them.

    Returns:
        o (..., Hq, T, d) and lse (..., Hq, T), both float32, d that of the values. A row that sees
        nothing has o = 0, lse = -inf.
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
    # exp(-inf - -inf) is NaN: a fully masked row gets weight zero instead.
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1))
    return weights @ v, lse


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block: ForwardBatch,
    scale: float,
    scoring: ScoreModifiers = NO_MODIFIERS,
    /,
) -> torch.Tensor:
    """Hybrid tree attention by its definition.

    Args:
        q: (B, Hq, T, d), after RoPE.
        keys, values: (slots, Hkv, capacity, d); the rows of the block itself are already written. The head size of
            values may be another than that of keys.
        block: slots, lengths, mask and begins of the sequences.
        scale: the softmax scale, usually d ** -0.5.
        scoring: soft cap and sinks of the layer.

    Returns:
        (B, Hq, T, d) in q's dtype, d that of the values.
    """
    out = q.new_empty(*q.shape[:3], values.shape[3])
    for b, (slot, n) in enumerate(zip(block.slots, block.prefix_lens, strict=True)):
        end, seen = n + block.tree_len, block.full_mask(b, q.device)
        o, _ = partial_attention(q[b], keys[slot, :, :end], values[slot, :, :end], scale, seen, scoring)
        out[b] = o.to(q.dtype)
    return out
