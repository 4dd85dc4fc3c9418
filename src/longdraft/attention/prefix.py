"""Prefix attention: queries that see every key of their slots' committed rows, and nothing else.

What a drafter's cross-attention to the target's KV is (LongSpec, section 3.1). Each path reads K and V where they
lie, once per KV head: the query heads of a group are folded into rows, legal because all of them see the same keys.

The contract, of every path: q (B, Hq, T, d) after RoPE; keys, values (slots, Hkv, capacity, d), any strides, Hq a
multiple of Hkv; a block of B sequences with T rows, of which slots and lengths (1 or more) count; the softmax scale;
returns (B, Hq, T, d) in q's dtype. On a GPU all sequences are one call, over the rows that each has.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from longdraft.attention.block import Block
from longdraft.attention.reference import partial_attention

# (q, keys, values, block, scale) -> output
PrefixAttend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Block, float], torch.Tensor]
# The same of one sequence: q (Hq, T, d), k and v (Hkv, n, d), scale -> output (Hq, T, d)
_One = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """By definition, in float32."""
    return partial_attention(q, k, v, scale)[0].to(q.dtype)


def cpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """A few rows in float32: products with the cache as it lies, transposed keys included; else torch's kernel."""
    from longdraft.attention.cpu import FEW_ROWS, _flash_prefix, few_rows

    folded = _folded(q, k)
    if q.shape[1] <= FEW_ROWS and q.dtype == torch.float32:
        out = few_rows(folded, k, v, None, scale)
    else:
        out = _flash_prefix(folded, k, v, scale)[0]
    return out.reshape(q.shape)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """torch's scaled_dot_product_attention without a mask: its fused kernels, any device."""
    return F.scaled_dot_product_attention(_folded(q, k)[None], k[None], v[None], scale=scale)[0].reshape(q.shape)


def hybrid(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block: Block, scale: float) -> torch.Tensor:
    """torch's kernels for sequences of several lengths."""
    from longdraft.attention.hybrid import attend_prefix

    return attend_prefix(q, keys, values, block, scale)


def flash(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block: Block, scale: float) -> torch.Tensor:
    """flash-attn; float16 and bfloat16 on a GPU."""
    from longdraft.attention.flash import attend_prefix

    return attend_prefix(q, keys, values, block, scale)


def triton(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block: Block, scale: float) -> torch.Tensor:
    """The Triton kernel, the prefixes split over the GPU."""
    from longdraft.attention.triton_backend import prefix_attention

    longest = max(block.lengths, default=0)
    return prefix_attention(q, keys, values, block.slots_t, block.lengths_t, scale, longest)[0].to(q.dtype)


def _each(one: _One) -> PrefixAttend:
    """A path that goes sequence by sequence."""

    def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block: Block, scale: float) -> torch.Tensor:
        out = torch.empty_like(q)
        for b, (slot, n) in enumerate(zip(block.slots, block.lengths, strict=True)):
            out[b] = one(q[b], keys[slot, :, :n], values[slot, :, :n], scale)
        return out

    return attend


def _folded(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """(Hq, T, d) -> (Hkv, G*T, d): row g*T + t of a KV head is query head g of its group, row t."""
    return q.reshape(k.shape[0], -1, q.shape[-1])


PATHS: dict[str, PrefixAttend] = {
    "reference": _each(reference),
    "cpu": _each(cpu),
    "sdpa": _each(sdpa),
    "hybrid": hybrid,
    "flash": flash,
    "triton": triton,
}


def resolve(path: str) -> PrefixAttend:
    """The prefix attention of a path that :func:`longdraft.attention.dispatch.choose` named."""
    return PATHS[path]
