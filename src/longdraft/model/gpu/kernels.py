"""Triton kernels for the parts of a decoder layer between its products: norm with residual, RoPE with KV write, SwiGLU.

A row is computed by programs of its own, so its bits do not depend on the rows beside it. Sums are float32, and results
are rounded to the layer's dtype wherever the model's own code rounds them. :mod:`.operators` has the definitions.
"""

# Triton reads the annotations of a kernel's parameters, so run-time parameters have none.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

# Triton's interpreter cuts a float32 down to bfloat16, where a GPU rounds it to the nearest.
CUTS = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
# Numbers of a row that one program of the SwiGLU kernel computes.
SHARE = 1024
MAX_WARPS = 16


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    """float32 to another dtype, to the nearest."""
    if CUTS and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def _rounded_in_float32(x, DTYPE: tl.constexpr):
    return _rounded(x, DTYPE).to(tl.float32)


@triton.jit
def norm_kernel(x, delta, weight, total, out, eps, ADDS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """out = weight * x / sqrt(mean(x^2) + eps) of one row; with ADDS of x + delta, which goes to ``total``.

    All are contiguous rows of SIZE. Grid: (rows,).
    """
    dtype = out.dtype.element_ty
    i = tl.arange(0, BLOCK)
    ok = i < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + i
    row = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
    if ADDS:
        row = _rounded_in_float32(row + tl.load(delta + at, mask=ok, other=0.0).to(tl.float32), dtype)
        tl.store(total + at, row.to(dtype), mask=ok)
    scale = tl.rsqrt(tl.sum(row * row, axis=0) / SIZE + eps)
    of_weight = tl.load(weight + i, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + at, _rounded(of_weight * _rounded_in_float32(row * scale, dtype), dtype), mask=ok)


@triton.jit
def _turned(
    head, weight, cos, sin, eps, DTYPE: tl.constexpr,
    NORMED: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A head's D numbers after its norm, if NORMED, and RoPE on the first ROTARY of them, whose halves are pairs."""
    half: tl.constexpr = ROTARY // 2
    i = tl.arange(0, BLOCK)
    ok = i < D
    turns = i < ROTARY
    pair = tl.where(i < half, i + half, tl.where(turns, i - half, i))
    x = tl.load(head + i, mask=ok, other=0.0).to(tl.float32)
    y = tl.load(head + pair, mask=ok, other=0.0).to(tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
        of_x = tl.load(weight + i, mask=ok, other=0.0).to(tl.float32)
        of_y = tl.load(weight + pair, mask=ok, other=0.0).to(tl.float32)
        x = _rounded_in_float32(of_x * _rounded_in_float32(x * scale, DTYPE), DTYPE)
        y = _rounded_in_float32(of_y * _rounded_in_float32(y * scale, DTYPE), DTYPE)
    if ROTARY > 0:
        c = tl.load(cos + i, mask=turns, other=0.0).to(tl.float32)
        s = tl.load(sin + i, mask=turns, other=0.0).to(tl.float32)
        across = _rounded_in_float32(tl.where(i < half, -y, y) * s, DTYPE)
        x = tl.where(turns, _rounded_in_float32(x * c, DTYPE) + across, x)
    return _rounded(x, DTYPE)


@triton.jit(do_not_specialize=["offset", "T"])  # or each new kind of number would be compiled in the midst of decoding
def rope_kernel(
    q, k, v, cos, sin, q_weight, k_weight, out, keys, values, slots, lengths, offset, eps, T,
    q_row, k_row, v_row, cos_b, cos_t, sin_b, sin_t, k_slot, k_head, k_n, k_d, v_slot, v_head, v_n, v_d,
    NORMED: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    D: tl.constexpr, ROTARY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of one row: query heads go to ``out`` (B, HEADS, T, D); keys and values go into the store, behind the
    sequence's rows and ``offset`` others. Keys and queries are normed and turned. Grid: (B*T, HEADS + 2 KV_HEADS).
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    b = row // T
    t = row % T
    dtype = out.dtype.element_ty
    i = tl.arange(0, BLOCK)
    ok = i < D
    cos += b * cos_b + t * cos_t
    sin += b * sin_b + t * sin_t
    if head < HEADS:
        turned = _turned(q + row * q_row + head * D, q_weight, cos, sin, eps, dtype, NORMED, D, ROTARY, BLOCK)
        tl.store(out + ((b * HEADS + head) * T + t) * D + i, turned, mask=ok)
    else:
        slot = tl.load(slots + b).to(tl.int64)
        n = tl.load(lengths + b).to(tl.int64) + offset + t
        if head < HEADS + KV_HEADS:
            own = head - HEADS
            turned = _turned(k + row * k_row + own * D, k_weight, cos, sin, eps, dtype, NORMED, D, ROTARY, BLOCK)
            tl.store(keys + slot * k_slot + own * k_head + n * k_n + i * k_d, turned, mask=ok)
        else:
            own = head - HEADS - KV_HEADS
            value = tl.load(v + row * v_row + own * D + i, mask=ok, other=0.0)
            tl.store(values + slot * v_slot + own * v_head + n * v_n + i * v_d, value, mask=ok)


@triton.jit
def silu_kernel(gate, up, out, gate_row, up_row, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """out = silu(gate) * up of a share of one row. Grid: (rows, shares of BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < SIZE
    dtype = out.dtype.element_ty
    g = tl.load(gate + row * gate_row + i, mask=ok, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + i, mask=ok, other=0.0).to(tl.float32)
    active = _rounded_in_float32(g / (1.0 + tl.exp(-g)), dtype)
    tl.store(out + row * SIZE + i, _rounded(active * u, dtype), mask=ok)


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
    total, out = torch.empty_like(x), torch.empty_like(x)
    _launch_norm(x, delta, weight, total, out, eps, True)
    return total, out


def _launch_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    total: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    adds: bool,
) -> None:
    size = x.shape[-1]
    if not x.numel():
        return
    block = triton.next_power_of_2(size)
    # By the size of a row alone: another number of warps would sum it in another order.
    warps = min(MAX_WARPS, max(1, block // 512))
    with torch.cuda.device_of(x):
        norm_kernel[(x.numel() // size,)](
            x, delta, weight, total, out, eps, ADDS=adds, SIZE=size, BLOCK=block, num_warps=warps
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
    lengths: torch.Tensor,
    offset: int,
) -> torch.Tensor:
    """Launches :func:`rope_kernel`; see :func:`longdraft.model.gpu.operators.rope_and_write_kv`."""
    (batch, size, width), d = q.shape, keys.shape[3]
    heads, kv_heads = width // d, k.shape[2] // d
    out = q.new_empty(batch, heads, size, d)
    if not out.numel():
        return out
    rows = [x if x.stride() == (size * x.stride(1), x.stride(1), 1) else x.contiguous() for x in (q, k, v)]
    cos, sin = (x.expand(batch, size, -1) for x in (cos, sin))
    normed = q_weight is not None and k_weight is not None
    with torch.cuda.device_of(q):
        rope_kernel[(batch * size, heads + 2 * kv_heads)](
            *rows, cos, sin, q_weight if normed else q, k_weight if normed else q, out, keys, values, slots, lengths,
            offset, eps, size, *(x.stride(1) for x in rows), *cos.stride()[:2], *sin.stride()[:2],
            *keys.stride(), *values.stride(), NORMED=normed, HEADS=heads, KV_HEADS=kv_heads, D=d,
            ROTARY=cos.shape[2], BLOCK=triton.next_power_of_2(d), num_warps=1,
            # Or a product and the sum behind it are one operation, which does not round the product.
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Launches :func:`silu_kernel`; see :func:`longdraft.model.gpu.operators.silu_and_mul`."""
    size = gate.shape[-1]
    out = gate.new_empty(gate.shape)
    if not out.numel():
        return out
    gates, ups = (_as_rows(x, size) for x in (gate, up))
    block = min(SHARE, triton.next_power_of_2(size))
    with torch.cuda.device_of(gate):
        silu_kernel[(gates.shape[0], triton.cdiv(size, block))](
            gates, ups, out, gates.stride(0), ups.stride(0), SIZE=size, BLOCK=block, num_warps=4
        )
    return out


def _as_rows(x: torch.Tensor, size: int) -> torch.Tensor:
    """(..., size) as (rows, size), without a copy if the rows are equally far apart, as in a part of a product."""
    rows = x.reshape(-1, size)
    return rows if rows.stride(1) == 1 else rows.contiguous()
