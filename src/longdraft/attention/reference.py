"""Plain attention: the definition against which every fast path is tested.

Notation, as in LongSpec (section 3.3, hybrid tree attention): q attends to the prefix without a mask and to
the tree with one. Each part gives an output o and a log-sum-exp l, and the parts are merged by

    l = log(sum_i exp(l_i)),    o = sum_i exp(l_i - l) o_i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from longdraft.attention.block import Block

# The contract of every path, as :func:`attend` documents it: (q, keys, values, block, scale) -> output
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Block, float], torch.Tensor]


def partial_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over one part of the keys, with its log-sum-exp, computed in float32.

    Args:
        q: (..., Hq, T, d); k, v: (..., Hkv, n, d), Hq a multiple of Hkv.
        mask: broadcastable to (..., Hq, T, n), True where q may see k; None if every q sees every k.

    Returns:
        o (..., Hq, T, d) and lse (..., Hq, T), both float32. A row that sees nothing has o = 0, lse = -inf.
    """
    group = q.shape[-3] // k.shape[-3]
    k = k.float().repeat_interleave(group, dim=-3)
    v = v.float().repeat_interleave(group, dim=-3)
    scores = (q.float() @ k.transpose(-1, -2)) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    # exp(-inf - -inf) is NaN: a fully masked row gets weight zero instead.
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1))
    return weights @ v, lse


def merge(outputs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges parts of one attention by their log-sum-exp, in float32.

    Args:
        outputs: each (..., T, d); lses: each (..., T), -inf for a part that saw nothing.

    Returns:
        The output (..., T, d) and log-sum-exp (..., T) of the union of the parts, float32.
    """
    stacked = torch.stack([lse.float() for lse in lses])
    total = torch.logsumexp(stacked, dim=0)
    weights = torch.exp(stacked - total.masked_fill(total == float("-inf"), 0.0))
    output = sum(w.unsqueeze(-1) * o.float() for w, o in zip(weights, outputs, strict=True))
    assert isinstance(output, torch.Tensor)
    return output, total


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block: Block, scale: float) -> torch.Tensor:
    """Hybrid tree attention by its definition.

    Args:
        q: (B, Hq, T, d), after RoPE.
        keys, values: (slots, Hkv, capacity, d); the rows of the block itself are already written.
        block: slots, lengths and mask of the sequences.
        scale: the softmax scale, usually d ** -0.5.

    Returns:
        (B, Hq, T, d) in q's dtype.
    """
    out = torch.empty_like(q)
    for b, (slot, n) in enumerate(zip(block.slots, block.lengths, strict=True)):
        end = n + block.width
        prefix = torch.ones(block.size, n, dtype=torch.bool, device=q.device)
        seen = torch.cat([prefix, block.block_mask(b, q.device)], dim=1)
        o, _ = partial_attention(q[b], keys[slot, :, :end], values[slot, :, :end], scale, seen)
        out[b] = o.to(q.dtype)
    return out
