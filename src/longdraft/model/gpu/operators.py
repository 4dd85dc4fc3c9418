"""torch custom operators for parts of a decoder layer, such as ``longdraft::rms_norm``: one launch each on a GPU.

The functions here define the operators in plain torch and run on a CPU. On a GPU, functions of :mod:`.kernels` run.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from longdraft.attention import custom_ops


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight (n,) * x (..., n) / sqrt(mean(x^2) + eps). The quotient is rounded to x's dtype before the product."""
    x32 = x.float()
    return weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns residual = x + delta (..., n), and the :func:`rms_norm` of residual."""
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
    lengths: torch.Tensor,
    offset: int,
) -> torch.Tensor:
    """Applies per-head norms and RoPE to queries and keys; writes keys and values into a layer's KV cache.

    Args:
        q: (B, T, Hq*d).
        k, v: (B, T, Hkv*d).
        cos, sin: (B or 1, T, r); RoPE (NeoX style) rotates the first r dimensions of a head; r may be 0.
        q_weight, k_weight: (d,), weights of the heads' :func:`rms_norm` before RoPE, or None for no norms.
        keys, values: the KV cache (slots, Hkv, capacity, d), with any strides.
        slots, lengths: (B,) int32: token t of sequence b gets entry ``lengths[b] + offset + t`` of ``slots[b]``.

    Returns:
        The queries (B, Hq, T, d), contiguous.
    """
    d = keys.shape[3]
    queries, new_keys, new_values = (x.unflatten(-1, (-1, d)).transpose(1, 2) for x in (q, k, v))
    if q_weight is not None and k_weight is not None:
        queries, new_keys = rms_norm(queries, q_weight, eps), rms_norm(new_keys, k_weight, eps)
    queries, new_keys = _rotate(queries, cos, sin), _rotate(new_keys, cos, sin)
    entries = lengths.long()[:, None] + torch.arange(offset, offset + q.shape[1], device=q.device)
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
    """silu(gate) * up, all (..., n)."""
    return F.silu(gate) * up


_KERNELS = "longdraft.model.gpu.kernels"
for _definition in (rms_norm, add_rms_norm, silu_and_mul):
    custom_ops.define_op(_definition, _KERNELS)
custom_ops.define_op(rope_and_write_kv, _KERNELS, mutates_args=("keys", "values"))
