"""Attention of training: of a text's last rows, in memory that grows with the length of the text, not with its square.

A row sees keys up to ``shift`` positions back, within a window. That serves three purposes:

- Flash noisy training (LongSpec, section 3.2): while drafting, the newest key that cross-attention sees is j positions
  before the query, j = 1 for the root and one more for each level of the tree.
- Plain causal attention, to all keys or to a window of them: shift 0.
- The training-time test (EAGLE-3, section 3): at step i a row is the last of i drafted rows. It sees the keys of step 0
  (made from the target's features) up to i positions back, and one key of each later step, which it alone sees.

Rows that see all keys before them go through torch's causal kernel. Others go in blocks, each with a mask of its own,
whose weights are computed again in the backward pass.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# Rows of a block. Keys that a row alone sees are in the mask of its whole block, so it is small.
BLOCK = 128

KVPair = tuple[torch.Tensor, torch.Tensor]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shift: int = 0,
    window: int | None = None,
    per_query_kv: KVPair | None = None,
) -> torch.Tensor:
    """Attention of the last rows of a text.

    Args:
        q: (Hq, n, d), the last n rows.
        k, v: (Hkv, T, d), all rows, after RoPE.
        shift: how far before a row its newest key lies.
        window: a row sees keys that lie less than this many positions before it; None for all.
        per_query_kv: keys and values that each row alone sees too, (Hkv, n, i, d) each.

    Returns:
        (Hq, n, d).
    """
    rows, end = q.shape[1], k.shape[1] - shift
    first = k.shape[1] - rows
    k, v = k.to(q.dtype), v.to(q.dtype)
    if per_query_kv is None and rows == end and (window is None or window >= k.shape[1]):
        q, k, v = q[None], k[None, :, :end], v[None, :, :end]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0]
    # Split, never sliced: the gradient of a slice is as large as the tensor it was cut from.
    queries = q.split(BLOCK, 1)
    mine = zip(*(x.split(BLOCK, 1) for x in per_query_kv), strict=True) if per_query_kv else [None] * len(queries)
    out = []
    for block, pair in zip(queries, mine, strict=True):
        last = first + block.shape[1]
        low = 0 if window is None else max(0, first - window + 1)
        seen = slice(low, last - shift)
        out.append(
            checkpoint(
                _block, block, k[:, seen], v[:, seen], first - low, shift, window, pair,
                use_reentrant=False, preserve_rng_state=False,
            )
        )  # fmt: skip
        first = last
    return torch.cat(out, 1)


def _block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, shift: int, window: int | None, own: KVPair | None
) -> torch.Tensor:
    """Attention of some rows, the first of which is row ``first`` of the keys."""
    rows, keys = torch.arange(q.shape[1], device=q.device), torch.arange(k.shape[1], device=q.device)
    behind = rows[:, None] + first - keys
    seen = (behind >= shift) & (behind < (window or len(behind) + first))
    if own is not None:
        each = (rows[:, None] == rows).repeat_interleave(own[0].shape[2], 1)
        seen = torch.cat([seen, each], 1)
        k, v = (torch.cat([x, its.to(x.dtype).flatten(1, 2)], 1) for x, its in zip((k, v), own, strict=True))
    # Repeated, because not every kernel takes grouped heads with a mask.
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0)[None] for x in (k, v))
    return F.scaled_dot_product_attention(q[None], k, v, seen)[0]
