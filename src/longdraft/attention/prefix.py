"""Prefix attention: queries that see every key of a slot's committed rows, and nothing else.

What a drafter's cross-attention to the target's KV is (LongSpec, section 3.1). Each path reads K and V where they
lie, once per KV head: the query heads of a group are folded into rows, legal because all of them see the same keys.

The contract, of every path: q (Hq, T, d) after RoPE; k, v (Hkv, n, d), any strides, n >= 1, Hq a multiple of Hkv;
the softmax scale; returns (Hq, T, d) in q's dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from longdraft.attention.reference import partial_attention

# (q, k, v, scale) -> output
PrefixAttend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


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


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """flash-attn, which groups heads itself; float16 and bfloat16 on a GPU."""
    from longdraft.attention.flash import whole

    return whole(q, k, v, scale, causal=False)


def triton(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """The Triton kernel, the prefix split over the GPU."""
    from longdraft.attention.triton_backend import prefix_attention

    n = k.shape[1]
    slot, length = (torch.full((1,), x, dtype=torch.int32, device=q.device) for x in (0, n))
    return prefix_attention(q[None], k[None], v[None], slot, length, scale, n)[0][0].to(q.dtype)


def _folded(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """(Hq, T, d) -> (Hkv, G*T, d): row g*T + t of a KV head is query head g of its group, row t."""
    return q.reshape(k.shape[0], -1, q.shape[-1])


PATHS: dict[str, PrefixAttend] = {
    "reference": reference,
    "cpu": cpu,
    "sdpa": sdpa,
    "flash": flash,
    "triton": triton,
}


def resolve(path: str) -> PrefixAttend:
    """The prefix attention of a path that :func:`longdraft.attention.dispatch.choose` named."""
    return PATHS[path]
