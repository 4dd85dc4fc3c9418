"""Attention in training: a document's last positions attend to its keys, in memory linear in the number of keys.

A query sees the keys from the edge of a window up to the key ``shift`` positions before the query. Uses:

- Flash noisy training (LongSpec, section 3.2): cross-attention of a node at level j of a draft tree has shift j,
  because the newest verified key lies j positions before the query.
- Causal attention, to all keys or to a sliding window: shift 0.
- Training-time test (EAGLE-3, section 3): the query of step i is a token that follows i drafted tokens. It sees the
  keys of step 0 (from the target's features) with shift i, and one key of each step 1 .. i for the drafted tokens.

Plain causal attention uses torch's causal kernel. All other attention runs in blocks of queries, with a mask for each
block. The backward pass recomputes a block's attention weights.

Shapes: Hq query heads and Hkv KV heads of d numbers, n queries, L keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# Number of queries in a block. A query adds a row to the block's mask, and a column for each per-query key.
QUERY_BLOCK = 128

KVPair = tuple[torch.Tensor, torch.Tensor]


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shift: int = 0, window: int | None = None,
    per_query_kv: KVPair | None = None,
) -> torch.Tensor:  # fmt: skip
    """Computes the attention of a document's last n positions, (Hq, n, d).

    Args:
        q: (Hq, n, d), after RoPE.
        k: (Hkv, L, d), after RoPE.
        v: (Hkv, L, d).
        shift: number of positions from a query back to the newest key that the query sees.
        window: a query sees the keys less than this many positions before it; None: all of them.
        per_query_kv: i further keys and values of each query, hidden from all other queries, (Hkv, n, i, d) each.
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
    block_kvs: Iterable[Any] = [None] * len(blocks)
    if per_query_kv:
        block_kvs = zip(*(x.split(QUERY_BLOCK, 1) for x in per_query_kv), strict=True)
    out = []
    for block, block_kv in zip(blocks, block_kvs, strict=True):
        end = first + block.shape[1]
        window_start = 0 if window is None else max(0, first - window + 1)
        visible = slice(window_start, end - shift)
        out.append(
            checkpoint(
                _attend_block, block, k[:, visible], v[:, visible], first - window_start, shift, window, block_kv,
                use_reentrant=False, preserve_rng_state=False,
            )
        )  # fmt: skip
        first = end
    return torch.cat(out, 1)


def _attend_block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, shift: int, window: int | None,
    per_query_kv: KVPair | None,
) -> torch.Tensor:  # fmt: skip
    """Computes :func:`attend` for a block of queries. ``first``: position of the first query, from the first key."""
    query_indices, key_positions = (torch.arange(x.shape[1], device=q.device) for x in (q, k))
    distance = query_indices[:, None] + first - key_positions
    mask = (distance >= shift) & (distance < (window or len(distance) + first))  # no window: no distance is as large
    if per_query_kv is not None:
        same_query = (query_indices[:, None] == query_indices).repeat_interleave(per_query_kv[0].shape[2], 1)
        mask = torch.cat([mask, same_query], 1)
        k, v = (torch.cat([x, y.to(x.dtype).flatten(1, 2)], 1) for x, y in zip((k, v), per_query_kv, strict=True))
    # KV heads are repeated, because not every kernel supports grouped-query attention with a mask.
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0)[None] for x in (k, v))
    return F.scaled_dot_product_attention(q[None], k, v, mask)[0]
