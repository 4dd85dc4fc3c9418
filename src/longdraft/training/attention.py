"""Training's attention: the last n positions of a document attend to all of it, in memory linear in its length.

A query sees the keys from the edge of a window up to the key ``shift`` positions before the query. Uses:

- Flash noisy training (LongSpec, section 3.2): cross-attention of a node at level j of a draft tree has shift j,
  because the newest verified key lies j positions before the query.
- Causal attention, to all keys or to a sliding window: shift 0.
- Training-time test (EAGLE-3, section 3): the query of step i is the last of i drafted tokens. It sees the keys of step
  0 (from the target's features) with shift i, and one key of each later step: the drafted tokens before it.

Plain causal attention uses torch's causal kernel. All other attention runs in blocks of queries, with a mask for each
block. The backward pass recomputes a block's attention weights.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# Queries of a block. Small, because the mask has a column for every per-query key of the block: it grows quadratically.
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
    """Attention of a document's last n positions to its T keys.

    Args:
        q: (Hq, n, d), after RoPE.
        k, v: (Hkv, T, d), k after RoPE.
        shift: number of positions from a query back to the newest key that it sees.
        window: a query sees the keys less than this many positions before it; None: all of them.
        per_query_kv: i further keys and values of each query, hidden from all other queries, (Hkv, n, i, d) each.

    Returns:
        (Hq, n, d).
    """
    query_len, num_visible = q.shape[1], k.shape[1] - shift
    first = k.shape[1] - query_len  # the position of a block's first query
    k, v = k.to(q.dtype), v.to(q.dtype)
    # With as many queries as visible keys, query i sees the keys 0 .. i.
    if per_query_kv is None and query_len == num_visible and (window is None or window >= k.shape[1]):
        q, k, v = q[None], k[None, :, :num_visible], v[None, :, :num_visible]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0]
    # Split, not sliced: the gradient of each slice would be as large as the whole tensor.
    blocks = q.split(QUERY_BLOCK, 1)
    extra = zip(*(x.split(QUERY_BLOCK, 1) for x in per_query_kv), strict=True) if per_query_kv else [None] * len(blocks)
    out = []
    for block, block_kv in zip(blocks, extra, strict=True):
        last = first + block.shape[1]
        low = 0 if window is None else max(0, first - window + 1)
        visible = slice(low, last - shift)
        out.append(
            checkpoint(
                _attend_block, block, k[:, visible], v[:, visible], first - low, shift, window, block_kv,
                use_reentrant=False, preserve_rng_state=False,
            )
        )  # fmt: skip
        first = last
    return torch.cat(out, 1)


def _attend_block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, shift: int, window: int | None, own_kv: KVPair | None
) -> torch.Tensor:
    """Attention of a block of queries. ``first``: the position of the first query; k and v begin at position 0."""
    queries, keys = torch.arange(q.shape[1], device=q.device), torch.arange(k.shape[1], device=q.device)
    distance = queries[:, None] + first - keys
    mask = (distance >= shift) & (distance < (window or len(distance) + first))  # no window: no distance is as large
    if own_kv is not None:
        same_query = (queries[:, None] == queries).repeat_interleave(own_kv[0].shape[2], 1)
        mask = torch.cat([mask, same_query], 1)
        k, v = (torch.cat([x, y.to(x.dtype).flatten(1, 2)], 1) for x, y in zip((k, v), own_kv, strict=True))
    # KV heads are repeated, because not every kernel supports grouped-query attention with a mask.
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0)[None] for x in (k, v))
    return F.scaled_dot_product_attention(q[None], k, v, mask)[0]
