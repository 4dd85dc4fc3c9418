"""A Triton kernel that dequantizes an int8 KV cache: reads each entry once, writes it once in the layer's dtype."""

# Triton reads the annotations of a kernel's parameters, so run-time parameters have none.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Elements that one program dequantizes.
PROGRAM_ELEMENTS = 8192


@triton.jit(do_not_specialize=["kv_len"])  # else new lengths would be compiled while decoding
def dequantize_kernel(
    quants, scales, slots, out, kv_len, heads, q_slot, q_head, q_entry, q_d, s_slot, s_head, s_entry,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Dequantizes a tile of entries of one KV head of one sequence. Grid: (tiles, B*Hkv). q_* and s_* are strides."""
    sequence_head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + sequence_head // heads).to(tl.int64)
    head = sequence_head % heads
    entries = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    ok_entries = entries < kv_len
    in_tile = ok_entries[:, None] & (dims < D)[None, :]
    offsets = slot * q_slot + head * q_head + entries[:, None] * q_entry + dims[None, :] * q_d
    x = tl.load(quants + offsets, mask=in_tile, other=0).to(tl.float32)
    scale = tl.load(scales + slot * s_slot + head * s_head + entries * s_entry, mask=ok_entries, other=0.0)
    out_offsets = (sequence_head * kv_len + entries)[:, None] * D + dims[None, :]
    tl.store(out + out_offsets, (x * scale[:, None]).to(out.dtype.element_ty), in_tile)


def dequantize_kv(
    quants: torch.Tensor, scales: torch.Tensor, slots: torch.Tensor, kv_len: int, dtype: torch.dtype
) -> torch.Tensor:
    """Launches :func:`dequantize_kernel`; see :func:`longdraft.attention.int8_kv.dequantize_kv`."""
    batch_size, (_, heads, _, d) = slots.shape[0], quants.shape
    out = torch.empty(batch_size, heads, kv_len, d, dtype=dtype, device=quants.device)
    if not out.numel():
        return out
    block_d = triton.next_power_of_2(d)
    block_n = max(1, PROGRAM_ELEMENTS // block_d)
    with torch.cuda.device_of(quants):
        dequantize_kernel[(triton.cdiv(kv_len, block_n), batch_size * heads)](
            quants, scales, slots, out, kv_len, heads, *quants.stride(), *scales.stride(),
            D=d, BLOCK_D=block_d, BLOCK_N=block_n, num_warps=4,
        )  # fmt: skip
    return out
