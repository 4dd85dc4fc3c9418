"""A Triton kernel that dequantizes an int8 KV cache: it reads each entry once, and writes the layer's dtype."""

# Triton reads the annotations of a kernel's parameters, so run-time parameters have none.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

PROGRAM_ELEMENTS = 8192  # elements that one program dequantizes


@triton.jit(do_not_specialize=["kv_len"])  # else new lengths would be compiled while decoding
def dequantize_kernel(
    quants, scales, slots, out, kv_len, kv_heads,
    quants_slot, quants_head, quants_n, quants_d, scales_slot, scales_head, scales_n,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Dequantizes a tile of entries n of one KV head of one sequence. Grid: (tiles, B*Hkv). quants_* are strides."""
    sequence_head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + sequence_head // kv_heads).to(tl.int64)
    head = sequence_head % kv_heads
    entries = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    entry_mask = entries < kv_len
    tile_mask = entry_mask[:, None] & (dims < D)[None, :]
    offsets = slot * quants_slot + head * quants_head + entries[:, None] * quants_n + dims[None, :] * quants_d
    x = tl.load(quants + offsets, mask=tile_mask, other=0).to(tl.float32)
    scale = tl.load(scales + slot * scales_slot + head * scales_head + entries * scales_n, mask=entry_mask, other=0.0)
    out_offsets = (sequence_head * kv_len + entries)[:, None] * D + dims[None, :]
    tl.store(out + out_offsets, (x * scale[:, None]).to(out.dtype.element_ty), tile_mask)


def dequantize_kv(
    quants: torch.Tensor, scales: torch.Tensor, slots: torch.Tensor, kv_len: int, dtype: torch.dtype
) -> torch.Tensor:
    """Launches :func:`dequantize_kernel`; see :func:`longdraft.attention.int8_kv.dequantize_kv`."""
    batch_size, (_, kv_heads, _, d) = slots.shape[0], quants.shape
    out = torch.empty(batch_size, kv_heads, kv_len, d, dtype=dtype, device=quants.device)
    if not out.numel():
        return out
    block_d = triton.next_power_of_2(d)
    block_n = max(1, PROGRAM_ELEMENTS // block_d)
    with torch.cuda.device_of(quants):
        dequantize_kernel[(triton.cdiv(kv_len, block_n), batch_size * kv_heads)](
            quants, scales, slots, out, kv_len, kv_heads, *quants.stride(), *scales.stride(),
            D=d, BLOCK_D=block_d, BLOCK_N=block_n, num_warps=4,
        )  # fmt: skip
    return out
