"""Defines torch operators for parts of a decoder layer, such as ``longdraft::rms_norm``. Each is one launch on a GPU.

On a CPU, the functions here run, in plain torch. On a GPU, functions of :mod:`.kernels` with the same names run.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from longdraft.attention import custom_ops


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns weight (n,) * y. First y = x (..., n) / sqrt(mean(x^2) + eps) is rounded to the dtype of x."""
    x32 = x.float()
    return weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns residual = x + delta, all (..., n), and :func:`rms_norm` of residual."""
    residual = x + delta
    return residual, rms_norm(residual, weight, eps)


def rope_and_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    offset: int,
) -> torch.Tensor:
    """Applies each head's norm and RoPE to queries and keys, and writes keys and values into a layer's KV cache.

    Args:
        q: (B, T, Hq*d), B sequences of T tokens, Hq query heads of size d.
        k, v: (B, T, Hkv*d), Hkv KV heads.
        cos, sin: (B or 1, T, r). RoPE (NeoX style) rotates the first r dimensions of a head; r may be 0.
        q_weight, k_weight: (d,), weights of the heads' :func:`rms_norm` before RoPE, with ``eps``; None: no norms.
        keys, values: the KV cache (slots, Hkv, capacity, d), with any strides.
        slots, starts: (B,) int32. Token t of sequence b is written to entry ``starts[b] + offset + t`` of ``slots[b]``.

    Returns:
        The queries (B, Hq, T, d), contiguous.
    """
    d = keys.shape[3]
    queries, new_keys, new_values = (x.unflatten(-1, (-1, d)).transpose(1, 2) for x in (q, k, v))
    if q_weight is not None and k_weight is not None:
        queries, new_keys = rms_norm(queries, q_weight, eps), rms_norm(new_keys, k_weight, eps)
    queries, new_keys = _rotate(queries, cos, sin), _rotate(new_keys, cos, sin)
    entries = starts.long()[:, None] + torch.arange(offset, offset + q.shape[1], device=q.device)
    index = slots.long()[:, None].expand_as(entries), entries
    keys.transpose(1, 2)[index] = new_keys.transpose(1, 2)
    values.transpose(1, 2)[index] = new_values.transpose(1, 2)
    return queries.contiguous()


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Applies RoPE to the first dimensions of each head (B, H, T, d)."""
    rotary, rest = heads.split([cos.shape[-1], heads.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = rotary.chunk(2, dim=-1)
    rotated_half = torch.cat([-second, first], dim=-1)
    return torch.cat([rotary * cos.unsqueeze(1) + rotated_half * sin.unsqueeze(1), rest], dim=-1)


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) * up, all (..., n)."""
    return F.silu(gate) * up


_TRITON_MODULE = "longdraft.model.gpu.kernels"
for _reference in (rms_norm, add_rms_norm, silu_and_mul):
    custom_ops.define_op(_reference, _TRITON_MODULE)
custom_ops.define_op(rope_and_write_kv, _TRITON_MODULE, mutates_args=("keys", "values"))
