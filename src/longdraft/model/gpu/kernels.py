"""Triton kernels for a decoder layer between its GEMMs: RMS norm with residual, RoPE with the KV write, SwiGLU.

A program handles one token, so a token's bits do not depend on other tokens. Kernels compute in float32, and round to
the layer's dtype wherever transformers' code rounds. :mod:`.operators` defines their results. Parameters such as k_head
are strides; dimensions are b (sequence), head, t (token), slot, n (KV entry), d (element) and row (of a matrix).
"""

# Triton would read annotations of run-time parameters, so they have none.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

# Triton's interpreter truncates float32 to bfloat16, but a GPU rounds to the nearest: round_cast() rounds by hand.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
SILU_BLOCK = 1024  # elements of a row that a program of the SwiGLU kernel computes
MAX_NORM_WARPS = 16


@triton.jit
def round_cast(x, DTYPE: tl.constexpr):
    """Casts float32 to another dtype. Ties round to even, as a GPU does."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def _round_to(x, DTYPE: tl.constexpr):
    return round_cast(x, DTYPE).to(tl.float32)


@triton.jit
def norm_kernel(
    x, delta, weight, residual, out, eps, HAS_RESIDUAL: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Normalizes one row: out = weight * x / sqrt(mean(x^2) + eps). If HAS_RESIDUAL, stores residual = x + delta, and
    normalizes residual instead of x. All tensors have contiguous rows of SIZE. Grid: (rows,)."""
    dtype = out.dtype.element_ty
    i = tl.arange(0, BLOCK)
    mask = i < SIZE
    offsets = tl.program_id(0).to(tl.int64) * SIZE + i
    row = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        row = _round_to(row + tl.load(delta + offsets, mask=mask, other=0.0).to(tl.float32), dtype)
        tl.store(residual + offsets, row.to(dtype), mask=mask)
    scale = tl.rsqrt(tl.sum(row * row, axis=0) / SIZE + eps)
    w = tl.load(weight + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offsets, round_cast(w * _round_to(row * scale, dtype), dtype), mask=mask)


@triton.jit
def _norm_rope(
    head, weight, cos, sin, eps, DTYPE: tl.constexpr,
    NORMED: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Applies RMS norm to a head of D elements, if NORMED, then RoPE (NeoX style) to the first ROTARY elements."""
    half: tl.constexpr = ROTARY // 2
    i = tl.arange(0, BLOCK)
    mask = i < D
    in_rotary = i < ROTARY
    partner = tl.where(i < half, i + half, tl.where(in_rotary, i - half, i))  # the element that i is rotated with
    x = tl.load(head + i, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(head + partner, mask=mask, other=0.0).to(tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
        weight_x = tl.load(weight + i, mask=mask, other=0.0).to(tl.float32)
        weight_y = tl.load(weight + partner, mask=mask, other=0.0).to(tl.float32)
        x = _round_to(weight_x * _round_to(x * scale, DTYPE), DTYPE)
        y = _round_to(weight_y * _round_to(y * scale, DTYPE), DTYPE)
    if ROTARY > 0:
        c = tl.load(cos + i, mask=in_rotary, other=0.0).to(tl.float32)
        s = tl.load(sin + i, mask=in_rotary, other=0.0).to(tl.float32)
        sin_term = _round_to(tl.where(i < half, -y, y) * s, DTYPE)
        x = tl.where(in_rotary, _round_to(x * c, DTYPE) + sin_term, x)
    return round_cast(x, DTYPE)


@triton.jit(do_not_specialize=["offset", "T"])  # specialization would recompile during decoding
def rope_kernel(
    q, k, v, cos, sin, q_weight, k_weight, out, keys, values, slots, starts, offset, eps, T,
    q_row, k_row, v_row, cos_b, cos_t, sin_b, sin_t, k_slot, k_head, k_n, k_d, v_slot, v_head, v_n, v_d,
    NORMED: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    D: tl.constexpr, ROTARY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalizes and rotates one head of token t of sequence b. Writes queries to ``out`` (B, HEADS, T, D), keys and
    values to entry ``starts[b] + offset + t`` of the sequence's slot. Grid: (B*T, HEADS + 2 KV_HEADS)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    b = row // T
    t = row % T
    dtype = out.dtype.element_ty
    i = tl.arange(0, BLOCK)
    mask = i < D
    cos += b * cos_b + t * cos_t
    sin += b * sin_b + t * sin_t
    if head < HEADS:
        rotated = _norm_rope(q + row * q_row + head * D, q_weight, cos, sin, eps, dtype, NORMED, D, ROTARY, BLOCK)
        tl.store(out + ((b * HEADS + head) * T + t) * D + i, rotated, mask=mask)
    else:
        slot = tl.load(slots + b).to(tl.int64)
        n = tl.load(starts + b).to(tl.int64) + offset + t
        if head < HEADS + KV_HEADS:
            h = head - HEADS
            rotated = _norm_rope(k + row * k_row + h * D, k_weight, cos, sin, eps, dtype, NORMED, D, ROTARY, BLOCK)
            tl.store(keys + slot * k_slot + h * k_head + n * k_n + i * k_d, rotated, mask=mask)
        else:
            h = head - HEADS - KV_HEADS
            value = tl.load(v + row * v_row + h * D + i, mask=mask, other=0.0)
            tl.store(values + slot * v_slot + h * v_head + n * v_n + i * v_d, value, mask=mask)


@triton.jit
def silu_kernel(gate, up, out, gate_row, up_row, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Computes out = silu(gate) * up for BLOCK elements of a row. Grid: (rows, cdiv(SIZE, BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < SIZE
    dtype = out.dtype.element_ty
    g = tl.load(gate + row * gate_row + i, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + i, mask=mask, other=0.0).to(tl.float32)
    activation = _round_to(g / (1.0 + tl.exp(-g)), dtype)
    tl.store(out + row * SIZE + i, round_cast(activation * u, dtype), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Launches :func:`norm_kernel`; see :func:`longdraft.model.gpu.operators.rms_norm`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch_norm(x, x, weight, out, out, eps, False)
    return out


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches :func:`norm_kernel`; see :func:`longdraft.model.gpu.operators.add_rms_norm`."""
    x, delta = x.contiguous(), delta.contiguous()
    residual, out = torch.empty_like(x), torch.empty_like(x)
    _launch_norm(x, delta, weight, residual, out, eps, True)
    return residual, out


def _launch_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    has_residual: bool,
) -> None:
    size = x.shape[-1]
    if not x.numel():
        return
    block = triton.next_power_of_2(size)
    # The number of warps sets the order of additions, so it depends on the row's size alone.
    warps = min(MAX_NORM_WARPS, max(1, block // 512))
    with torch.cuda.device_of(x):
        norm_kernel[(x.numel() // size,)](
            x, delta, weight, residual, out, eps, HAS_RESIDUAL=has_residual, SIZE=size, BLOCK=block, num_warps=warps
        )


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
    """Launches :func:`rope_kernel`; see :func:`longdraft.model.gpu.operators.rope_and_write_kv`."""
    (batch_size, query_len, q_size), d = q.shape, keys.shape[3]
    heads, kv_heads = q_size // d, k.shape[2] // d
    out = q.new_empty(batch_size, heads, query_len, d)
    if not out.numel():
        return out
    # The kernel wants rows of one stride, as slices of a merged GEMM's output have.
    qkv = [x if x.stride() == (query_len * x.stride(1), x.stride(1), 1) else x.contiguous() for x in (q, k, v)]
    cos, sin = (x.expand(batch_size, query_len, -1) for x in (cos, sin))
    normed = q_weight is not None and k_weight is not None
    with torch.cuda.device_of(q):
        rope_kernel[(batch_size * query_len, heads + 2 * kv_heads)](
            *qkv, cos, sin, q_weight if normed else q, k_weight if normed else q, out, keys, values, slots, starts,
            offset, eps, query_len, *(x.stride(1) for x in qkv), *cos.stride()[:2], *sin.stride()[:2],
            *keys.stride(), *values.stride(), NORMED=normed, HEADS=heads, KV_HEADS=kv_heads, D=d,
            ROTARY=cos.shape[2], BLOCK=triton.next_power_of_2(d), num_warps=1,
            # A fused multiply-add would not round the product, as transformers does.
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Launches :func:`silu_kernel`; see :func:`longdraft.model.gpu.operators.silu_and_mul`."""
    size = gate.shape[-1]
    out = gate.new_empty(gate.shape)
    if not out.numel():
        return out
    gates, ups = (_as_matrix(x, size) for x in (gate, up))
    block = min(SILU_BLOCK, triton.next_power_of_2(size))
    with torch.cuda.device_of(gate):
        silu_kernel[(gates.shape[0], triton.cdiv(size, block))](
            gates, ups, out, gates.stride(0), ups.stride(0), SIZE=size, BLOCK=block, num_warps=4
        )
    return out


def _as_matrix(x: torch.Tensor, size: int) -> torch.Tensor:
    """Views (..., size) as (rows, size). Copies x only if its rows do not have one stride or are not contiguous."""
    rows = x.reshape(-1, size)
    return rows if rows.stride(1) == 1 else rows.contiguous()
