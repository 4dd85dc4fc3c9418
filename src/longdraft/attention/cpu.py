"""Hybrid tree attention on a CPU. Memory traffic is the limit, so K and V are read once per KV head.

There are two regimes, by the number of query rows:

* A tree or chain of a few rows (decoding). All query heads of a group see the same prefix, so they are folded into
  rows. Our own kernel (native/attention.cpp) computes them if it could be compiled; otherwise each KV head is one small
  matrix product with the cache in place. Scores of prefix and tree stand in one row, so one softmax covers both parts
  and the mask applies to the tree's columns only.
* A long chain (a prefill chunk), whose scores would not fit the processor's caches. Our kernel computes it in tiles;
  without it torch's flash kernel runs over the prefix with folded heads and causally over the chunk, and the parts are
  merged by log-sum-exp.

Our kernels give a row the same bits in both regimes, and in a tree the bits that it would get alone.
"""

from __future__ import annotations

import torch

from longdraft import native
from longdraft.attention import sdpa
from longdraft.attention.block import PLAIN, Block, Scoring
from longdraft.attention.reference import merge, partial_attention

# Query rows (T) up to which the score matrix is formed in full.
FEW_ROWS = 96
# Prefix rows from which one threaded product per KV head is faster than a batched product over the heads.
LONG_PREFIX = 1024
# Scores computed at a time on a long prefix. The allocator keeps memory of this size; more is mapped anew each time.
SCORES_AT_ONCE = 2**21

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block: Block,
    scale: float,
    scoring: Scoring = PLAIN,
    /,
) -> torch.Tensor:
    """Same contract as :func:`longdraft.attention.reference.attend`."""
    kernels = native.kernels()
    ours = kernels if kernels is not None and native.fits(q, keys[0], values[0]) else None
    plain = block.begins is None and scoring is PLAIN and keys.shape[3] == values.shape[3]
    if ours is None and not plain:
        return _row_by_row(q, keys, values, block, scale, scoring)
    batch, heads, size, dim = q.shape
    kv_heads = keys.shape[1]
    # (B, Hkv, G*T, d): row g*T + t of a KV head is query head g of its group, block row t.
    folded = q.reshape(batch, kv_heads, heads // kv_heads * size, dim)
    few = size <= FEW_ROWS and q.dtype == torch.float32
    chain = block.mask is None and not block.offset
    out = q.new_empty(batch, heads, size, values.shape[3])
    for b, (slot, n) in enumerate(zip(block.slots, block.lengths, strict=True)):
        k, v = (x[slot, :, : n + block.width] for x in (keys, values))
        tree = None if block.width == 1 else block.block_mask(b, q.device)
        if ours is not None:
            begins, cap, sinks = None if block.begins is None else block.begins[b], scoring.softcap, scoring.sinks
            if chain and not few:
                own = ours.attend_chunk(q[b], k, v, scale, begins=begins, softcap=cap, sinks=sinks)
            else:
                own = ours.attend(folded[b], k, v, tree, scale, begins=begins, softcap=cap, sinks=sinks)
        elif few:
            own = few_rows(folded[b], k, v, tree, scale)
        elif tree is None:  # the row sees every key
            own = flash_prefix(folded[b], k, v, scale)[0]
        else:
            own = _many_rows(q[b], folded[b], k, v, n, block, b, scale)
        out[b] = own.view_as(out[b])
    return out


def _row_by_row(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block: Block, scale: float, scoring: Scoring
) -> torch.Tensor:
    """Computes each row alone on the keys that it sees, so that its bits do not depend on the rows beside it. A piece
    of a prompt is computed at once."""
    if block.prompt:
        return sdpa.attend(q, keys, values, block, scale, scoring)
    out = q.new_empty(*q.shape[:3], values.shape[3])
    for b, (slot, n) in enumerate(zip(block.slots, block.lengths, strict=True)):
        k, v = (x[slot, :, : n + block.width].to(q.dtype) for x in (keys, values))
        for t, seen in enumerate(block.visible(b, q.device)):
            rows = seen.nonzero().squeeze(1)
            one = q[b, :, t : t + 1]
            o, _ = partial_attention(one, k.index_select(1, rows), v.index_select(1, rows), scale, None, scoring)
            out[b, :, t : t + 1] = o.to(q.dtype)
    return out


def few_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tree: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """q (Hkv, G*T, d); k, v (Hkv, n+W, d); tree (T, W), or None if every key is seen -> like q."""
    kernels = native.kernels()
    if kernels is not None and native.fits(q, k, v):
        return kernels.attend(q, k, v, tree, scale)
    k, v = k.to(q.dtype), v.to(q.dtype)  # a view may hold another dtype
    q, kt, out = q * scale, k.transpose(1, 2), torch.empty_like(q)
    hidden = None if tree is None else (~tree).repeat(q.shape[1] // tree.shape[0], 1)
    n = k.shape[1] if tree is None else k.shape[1] - tree.shape[1]
    if k.shape[1] < LONG_PREFIX:
        scores = torch.bmm(q, kt)
        if hidden is not None:
            scores[..., n:].masked_fill_(hidden, float("-inf"))
        return torch.bmm(torch.softmax(scores, -1), v, out=out)
    rows = max(1, SCORES_AT_ONCE // k.shape[1])
    for head in range(k.shape[0]):
        for a in range(0, q.shape[1], rows):
            part = slice(a, a + rows)
            scores = torch.mm(q[head, part], kt[head])
            if hidden is not None:
                scores[:, n:].masked_fill_(hidden[part], float("-inf"))
            torch.mm(torch.softmax(scores, -1), v[head], out=out[head, part])
    return out


def _many_rows(
    q: torch.Tensor,
    folded: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    n: int,
    block: Block,
    b: int,
    scale: float,
) -> torch.Tensor:
    """q (Hq, T, d); folded (Hkv, G*T, d); k, v (Hkv, n+W, d), W rows of the tree so far -> (Hkv, G*T, d)."""
    heads, size, dim = q.shape
    kv_heads = k.shape[0]
    group = heads // kv_heads
    k, v = k.to(q.dtype), v.to(q.dtype)
    own_k, own_v = (x[:, n:].repeat_interleave(group, dim=0)[None].contiguous() for x in (k, v))
    if block.mask is None and not block.offset:  # the kernel aligns its causal mask to the upper left
        own, own_lse = _flash(q[None], own_k, own_v, 0.0, True, scale=scale)
    else:
        seen = block.block_mask(b, q.device)
        hidden = torch.zeros(seen.shape, dtype=q.dtype, device="cpu").masked_fill_(~seen, float("-inf"))
        own, own_lse = _flash(q[None], own_k, own_v, 0.0, False, attn_mask=hidden[None, None], scale=scale)
    own = own.reshape(kv_heads, group * size, dim)
    if n == 0:
        return own
    prefix, prefix_lse = flash_prefix(folded, k[:, :n], v[:, :n], scale)
    own_lse = own_lse.reshape(kv_heads, group * size)
    merged, _ = merge([prefix, own], [prefix_lse.reshape(kv_heads, group * size), own_lse])
    return merged.to(q.dtype)


def flash_prefix(
    folded: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """folded (Hkv, rows, d) on all of k, v (Hkv, n, d) -> output like folded, log-sum-exp (Hkv, rows)."""
    k, v = k.to(folded.dtype), v.to(folded.dtype)
    # The kernel needs contiguous rows; copying transposed keys costs little compared with a chunk's work.
    if k.stride(-1) != 1:
        k = k.contiguous()
    out, lse = _flash(folded[None], k[None], v[None], 0.0, False, scale=scale)
    return out[0], lse[0]
