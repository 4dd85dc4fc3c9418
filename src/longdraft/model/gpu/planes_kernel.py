"""The Triton kernel of linear layers with quantised weights, :func:`longdraft.model.quant.planes.planes_linear`.

A program computes TILE_N outputs of TILE_M rows, in steps of TILE_K inputs. It reads the quants once, turns them into
weights in registers, and multiplies on tensor cores. A row's sums do not depend on the other rows of its tile.
"""

# Triton would read annotations of run-time parameters, so they have none.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from longdraft.attention.triton_kernels import DOT_TYPES
from longdraft.model.gpu.kernels import round_cast

MIN_TILE_ROWS, MAX_TILE_ROWS = 16, 64  # 16 is the least that tl.dot takes
TILE_OUTPUTS, MAX_TILE_INPUTS = 32, 256
WARPS, STAGES = 4, 3


@triton.jit
def _add_products(
    acc, x, m, rows, x_row, k, quants, firsts, block_scales, group_scales, n, outs, K,
    ZERO: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, FIELDS: tl.constexpr, HAS_GROUPS: tl.constexpr,
    UNITS: tl.constexpr, UNIT: tl.constexpr, TILE_N: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Adds the products of inputs k + firsts + (0 .. UNIT) with quants (TILE_N, UNITS * UNIT) to acc. The weights of a
    unit have one scale; firsts (UNITS,) is the first weight of each unit in the tile that begins at weight k."""
    in_outs = (n < outs)[:, None]
    place = (n.to(tl.int64)[:, None] * (K // BLOCK) + ((k + firsts) // BLOCK)[None, :]) * FIELDS
    scale = tl.load(block_scales + place, mask=in_outs, other=0.0).to(tl.float32)
    group = (n.to(tl.int64)[:, None] * (K // GROUP) + ((k + firsts) // GROUP)[None, :]) * FIELDS
    if HAS_GROUPS:
        scale = scale * tl.load(group_scales + group, mask=in_outs, other=0).to(tl.float32)
    weights = (tl.reshape(quants, (TILE_N, UNITS, UNIT)).to(tl.float32) - ZERO) * scale[:, :, None]
    if FIELDS == 2:
        minimum = tl.load(block_scales + place + 1, mask=in_outs, other=0.0).to(tl.float32)
        minimum = minimum * tl.load(group_scales + group + 1, mask=in_outs, other=0).to(tl.float32)
        weights = weights - minimum[:, :, None]
    dtype = x.dtype.element_ty
    weights = round_cast(tl.reshape(weights, (TILE_N, UNITS * UNIT)), dtype)
    columns = tl.reshape(firsts[:, None] + tl.arange(0, UNIT)[None, :], (UNITS * UNIT,))
    inputs = tl.load(x + m.to(tl.int64)[:, None] * x_row + (k + columns)[None, :], mask=(m < rows)[:, None], other=0.0)
    return tl.dot(inputs.to(DOT), tl.trans(weights).to(DOT), acc, input_precision="ieee")


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x, quants, block_scales, group_scales, bias, out, rows, outs, x_row,
    K: tl.constexpr, INTERLEAVE: tl.constexpr, ZERO: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    FIELDS: tl.constexpr, HAS_GROUPS: tl.constexpr, HAS_BIAS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Computes out (rows, outs) = x (rows, K) @ weights^T. BLOCK and GROUP: weights for each entry of block_scales and
    group_scales, which have FIELDS numbers. Grid: (cdiv(outs, TILE_N), cdiv(rows, TILE_M))."""
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    m = tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)
    in_outs = (n < outs)[:, None]
    acc = tl.zeros((TILE_M, TILE_N), tl.float32)
    for k in range(0, K, TILE_K):
        if INTERLEAVE:
            units: tl.constexpr = TILE_K // 2 // INTERLEAVE
            i = tl.arange(0, TILE_K // 2)
            places = n.to(tl.int64)[:, None] * (K // 2) + (k // 2 + i)[None, :]
            packed = tl.load(quants + places, mask=in_outs, other=0)
            low = tl.arange(0, units) * (2 * INTERLEAVE)
            acc = _add_products(
                acc, x, m, rows, x_row, k, packed & 15, low, block_scales, group_scales, n, outs, K,
                ZERO, BLOCK, GROUP, FIELDS, HAS_GROUPS, units, INTERLEAVE, TILE_N, DOT,
            )  # fmt: skip
            acc = _add_products(
                acc, x, m, rows, x_row, k, packed >> 4, low + INTERLEAVE, block_scales, group_scales, n, outs, K,
                ZERO, BLOCK, GROUP, FIELDS, HAS_GROUPS, units, INTERLEAVE, TILE_N, DOT,
            )  # fmt: skip
        else:
            groups: tl.constexpr = TILE_K // GROUP
            places = n.to(tl.int64)[:, None] * K + (k + tl.arange(0, TILE_K))[None, :]
            integers = tl.load(quants + places, mask=in_outs, other=0)
            acc = _add_products(
                acc, x, m, rows, x_row, k, integers, tl.arange(0, groups) * GROUP, block_scales, group_scales, n, outs,
                K, ZERO, BLOCK, GROUP, FIELDS, HAS_GROUPS, groups, GROUP, TILE_N, DOT,
            )  # fmt: skip
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=n < outs, other=0.0).to(tl.float32)[None, :]
    places = m.to(tl.int64)[:, None] * outs + n[None, :]
    tl.store(out + places, round_cast(acc, out.dtype.element_ty), mask=(m < rows)[:, None] & (n < outs)[None, :])


def planes_linear(
    x: torch.Tensor,
    quants: torch.Tensor,
    block_scales: torch.Tensor,
    group_scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    interleave: int,
    zero: int,
) -> torch.Tensor:
    """Launches :func:`linear_kernel`; see :func:`longdraft.model.quant.planes.planes_linear`."""
    (rows, k), (outs, num_blocks, fields) = x.shape, block_scales.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    out = x.new_empty(rows, outs)
    if not rows:
        return out
    group = k // (num_blocks if group_scales is None else group_scales.shape[1])
    tile_rows = max(MIN_TILE_ROWS, min(MAX_TILE_ROWS, triton.next_power_of_2(rows)))
    # Registers and shared memory of a processor hold two programs or more (benchmarks/triton_compiled.py).
    tile_inputs = MAX_TILE_INPUTS if tile_rows < MAX_TILE_ROWS else MAX_TILE_INPUTS // 2
    with torch.cuda.device_of(x):
        linear_kernel[(triton.cdiv(outs, TILE_OUTPUTS), triton.cdiv(rows, tile_rows))](
            x, quants, block_scales.view(torch.float16), quants if group_scales is None else group_scales,
            x if bias is None else bias, out, rows, outs, x.stride(0),
            K=k, INTERLEAVE=interleave, ZERO=zero, BLOCK=k // num_blocks, GROUP=group, FIELDS=fields,
            HAS_GROUPS=group_scales is not None, HAS_BIAS=bias is not None, TILE_M=tile_rows, TILE_N=TILE_OUTPUTS,
            TILE_K=math.gcd(k, tile_inputs), DOT=DOT_TYPES[x.dtype], num_warps=WARPS, num_stages=STAGES,
            enable_fp_fusion=False,  # a fused multiply-add would give other weights than on a CPU
        )  # fmt: skip
    return out
