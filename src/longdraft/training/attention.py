"""Training's attention: the last n positions of a text attend to all of it, in memory linear in its length.

The newest key that a query sees lies ``shift`` positions before it, the oldest at the edge of a window:

- Flash noisy training (LongSpec, section 3.2): cross-attention of a node at level j of a drafted tree has shift j, as
  the newest verified key lies j positions before the query.
- Causal attention, to all keys or to a sliding window: shift 0.
- Training-time test (EAGLE-3, section 3): the query of step i is the last of i drafted tokens. It sees the keys of step
  0 (from the target's features) with shift i, and one key of each later step, its own ancestors.

Plain causal attention uses torch's causal kernel. Everything else runs in blocks of queries with a mask for each block;
attention weights are computed again in the backward pass.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# Queries of a block. Small, because the mask of a block has a column for each per-query key of each of its queries.
QUERY_BLOCK = 128

KVPair = tuple[torch.Tensor, torch.Tensor]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shift: int = 0,
    window: int | None = None,
    per_query_kv: KVPair | None = None,
) -> torch.Tensor:
    """Attention of the last n positions of a text to its T keys.

    Args:
        q: (Hq, n, d), after RoPE.
        k, v: (Hkv, T, d), after RoPE.
        shift: distance from a query to the newest key that it sees.
        window: a query sees keys less than this many positions before it; None: all.
        per_query_kv: i more keys and values for each query, which no other query sees, (Hkv, n, i, d) each.

    Returns:
        (Hq, n, d).
    """
    query_len, end = q.shape[1], k.shape[1] - shift
    first = k.shape[1] - query_len
    k, v = k.to(q.dtype), v.to(q.dtype)
    if per_query_kv is None and query_len == end and (window is None or window >= k.shape[1]):
        q, k, v = q[None], k[None, :, :end], v[None, :, :end]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0]
    # Split, never sliced: the gradient of a slice is as large as the tensor it was cut from.
    blocks = q.split(QUERY_BLOCK, 1)
    extra = zip(*(x.split(QUERY_BLOCK, 1) for x in per_query_kv), strict=True) if per_query_kv else [None] * len(blocks)
    out = []
    for block, extra_kv in zip(blocks, extra, strict=True):
        last = first + block.shape[1]
        low = 0 if window is None else max(0, first - window + 1)
        visible = slice(low, last - shift)
        out.append(
            checkpoint(
                _attend_block, block, k[:, visible], v[:, visible], first - low, shift, window, extra_kv,
                use_reentrant=False, preserve_rng_state=False,
            )
        )  # fmt: skip
        first = last
    return torch.cat(out, 1)


def _attend_block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, shift: int, window: int | None, extra: KVPair | None
) -> torch.Tensor:
    """Attention of a block of queries, of which query 0 has the position of key ``first``."""
    queries, keys = torch.arange(q.shape[1], device=q.device), torch.arange(k.shape[1], device=q.device)
    distance = queries[:, None] + first - keys
    mask = (distance >= shift) & (distance < (window or len(distance) + first))
    if extra is not None:
        same_query = (queries[:, None] == queries).repeat_interleave(extra[0].shape[2], 1)
        mask = torch.cat([mask, same_query], 1)
        k, v = (torch.cat([x, more.to(x.dtype).flatten(1, 2)], 1) for x, more in zip((k, v), extra, strict=True))
    # Repeated, because not every kernel supports grouped-query attention with a mask.
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0)[None] for x in (k, v))
    return F.scaled_dot_product_attention(q[None], k, v, mask)[0]
