"""Parts of a decoder layer as operators of torch, such as ``longdraft::rms_norm``: one launch each on a GPU.

The functions here are their definitions in plain torch, which serve on a CPU. On a GPU the kernels of
:mod:`.kernels` compute the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from longdraft.attention import custom_ops


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x (..., n) and weight (n,) -> weight * x / sqrt(mean(x^2) + eps), rounded to x's dtype before the weight."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x and delta (..., n) -> their sum, and its :func:`rms_norm`."""
    total = x + delta
    return total, rms_norm(total, weight, eps)


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
    lengths: torch.Tensor,
    offset: int,
) -> torch.Tensor:
    """RoPE of queries and keys; keys and values are written into a layer's rows.

    Args:
        q: (B, T, Hq*d).
        k, v: (B, T, Hkv*d).
        cos, sin: (B or 1, T, r): the first r numbers of a head are turned, whose halves are pairs; r = 0 turns none.
        q_weight, k_weight: (d,) of the :func:`rms_norm` of each head before RoPE; None without.
        keys, values: (slots, Hkv, capacity, d), any strides.
        slots, lengths: (B,) int32: row t of sequence b goes to row ``lengths[b] + offset + t`` of ``slots[b]``.

    Returns:
        The queries (B, Hq, T, d), contiguous.
    """
    d = keys.shape[3]
    queries, new_keys, new_values = (x.unflatten(-1, (-1, d)).transpose(1, 2) for x in (q, k, v))
    if q_weight is not None and k_weight is not None:
        queries, new_keys = rms_norm(queries, q_weight, eps), rms_norm(new_keys, k_weight, eps)
    queries, new_keys = _turned(queries, cos, sin), _turned(new_keys, cos, sin)
    rows = lengths.long()[:, None] + torch.arange(offset, offset + q.shape[1], device=q.device)
    places = slots.long()[:, None].expand_as(rows), rows
    keys.transpose(1, 2)[places] = new_keys.transpose(1, 2)
    values.transpose(1, 2)[places] = new_values.transpose(1, 2)
    return queries.contiguous()


def _turned(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE of the first numbers of each head (B, H, T, d)."""
    turning, rest = heads.split([cos.shape[-1], heads.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = turning.chunk(2, dim=-1)
    across = torch.cat([-second, first], dim=-1)
    return torch.cat([turning * cos.unsqueeze(1) + across * sin.unsqueeze(1), rest], dim=-1)


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate and up (..., n) -> silu(gate) * up."""
    return F.silu(gate) * up


_KERNELS = "longdraft.model.gpu.kernels"
for _definition in (rms_norm, add_rms_norm, silu_and_mul):
    custom_ops.define_op(_definition, _KERNELS)
custom_ops.define_op(rope_and_write_kv, _KERNELS, mutates_args=("keys", "values"))
