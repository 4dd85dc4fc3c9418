"""Prefix attention: queries that see every committed row of their slot, and no other rows.

A drafter's cross-attention to the target's KV is of this kind (LongSpec, section 3.1). Each path reads K and V in
place, once per KV head: all query heads of a group see the same keys, so they are folded into rows.

Every path has the same contract. It takes q (B, Hq, T, d) after RoPE; keys, values (slots, Hkv, capacity, d) with any
strides, Hq a multiple of Hkv; a block of B sequences with T rows, of which slots and lengths (at least 1) are read; and
the softmax scale. It returns (B, Hq, T, d) in q's dtype. On a GPU one call serves all sequences.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from longdraft import native
from longdraft.attention import cpu, hybrid, sdpa
from longdraft.attention.block import Block
from longdraft.attention.reference import partial_attention

# (q, keys, values, block, scale) -> output
PrefixAttend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Block, float], torch.Tensor]
# The same for one sequence: q (Hq, T, d), k and v (Hkv, n, d), scale -> output (Hq, T, d)
_One = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


def _reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    return partial_attention(q, k, v, scale)[0].to(q.dtype)


def _cpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    kernels = native.kernels() if q.shape[1] <= cpu.FEW_ROWS and native.fits(q, k, v) else None
    if kernels is None:
        return sdpa.one_text(q, k, v, scale=scale)
    # (Hkv, G*T, d): row g*T + t of a KV head is query head g of its group, row t.
    return kernels.attend(q.reshape(k.shape[0], -1, q.shape[-1]), k, v, None, scale).reshape(q.shape)


def _each(one: _One) -> PrefixAttend:
    """Makes a path that computes one sequence at a time."""

    def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block: Block, scale: float) -> torch.Tensor:
        out = torch.empty_like(q)
        for b, (slot, n) in enumerate(zip(block.slots, block.lengths, strict=True)):
            out[b] = one(q[b], keys[slot, :, :n], values[slot, :, :n], scale)
        return out

    return attend


# The prefix attention of each path that :func:`longdraft.attention.dispatch.choose` may name.
PATHS: dict[str, PrefixAttend] = {
    "reference": _each(_reference),
    "cpu": _each(_cpu),
    "sdpa": _each(lambda q, k, v, scale: sdpa.one_text(q, k, v, scale=scale)),
    "hybrid": hybrid.attend_prefix,
}
