"""A Triton kernel that unpacks rows in eight bits: they are read once, and written once in the layer's dtype."""

# Triton reads the annotations of a kernel's parameters, so run-time parameters have none.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Numbers of one program.
TILE = 8192


@triton.jit(do_not_specialize=["rows"])  # or each new kind of number would be compiled in the midst of decoding
def dequantize_kernel(
    numbers, scales, slots, out, rows, heads, n_slot, n_head, n_row, n_d, s_slot, s_head, s_row,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Some rows of one head of one sequence. Grid: (row tiles, B*Hkv)."""
    own = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + own // heads).to(tl.int64)
    head = own % heads
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    ok = n < rows
    tile = ok[:, None] & (dims < D)[None, :]
    at = slot * n_slot + head * n_head + n[:, None] * n_row + dims[None, :] * n_d
    x = tl.load(numbers + at, mask=tile, other=0).to(tl.float32)
    scale = tl.load(scales + slot * s_slot + head * s_head + n * s_row, mask=ok, other=0.0)
    tl.store(out + (own * rows + n)[:, None] * D + dims[None, :], (x * scale[:, None]).to(out.dtype.element_ty), tile)


def dequantize_kv(
    quantized: torch.Tensor, scales: torch.Tensor, slots: torch.Tensor, kv_len: int, dtype: torch.dtype
) -> torch.Tensor:
    """Launches :func:`dequantize_kernel`; see :func:`longdraft.attention.int8_kv.dequantize_kv`."""
    batch, (_, heads, _, d) = slots.shape[0], quantized.shape
    out = torch.empty(batch, heads, kv_len, d, dtype=dtype, device=quantized.device)
    if not out.numel():
        return out
    block_d = triton.next_power_of_2(d)
    block_n = max(1, TILE // block_d)
    with torch.cuda.device_of(quantized):
        dequantize_kernel[(triton.cdiv(kv_len, block_n), batch * heads)](
            quantized, scales, slots, out, kv_len, heads, *quantized.stride(), *scales.stride(),
            D=d, BLOCK_D=block_d, BLOCK_N=block_n, num_warps=4,
        )  # fmt: skip
    return out
