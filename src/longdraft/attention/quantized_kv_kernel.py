"""Triton kernels that dequantize a KV cache in int8 or int4: they read each entry once, and write the layer's dtype."""

# Triton reads the annotations of a kernel's parameters, so run-time parameters have none.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from longdraft.native.quantized_kv import GROUP_PAIRS, GROUP_SCALE_BYTES, Int4Layout

PROGRAM_ELEMENTS = 8192  # elements that one program dequantizes


@triton.jit(do_not_specialize=["kv_len"])  # else new lengths would be compiled while decoding
def dequantize_int8_kernel(
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


@triton.jit(do_not_specialize=["kv_len"])
def dequantize_int4_kernel(
    data, slots, out, kv_len, kv_heads, data_slot, data_head, data_n, data_byte,
    PAIRS: tl.constexpr, PACKED: tl.constexpr, GROUP_SCALES: tl.constexpr, SLOW_SCALE: tl.constexpr,
    GROUP_PAIRS: tl.constexpr, GROUP_SCALE_BYTES: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Does what :func:`dequantize_int8_kernel` does for entries of the format of native/int4_kv.h. The first PACKED
    pairs are in four bits. GROUP_SCALES and SLOW_SCALE: the first byte of these scales. data_* are strides."""
    sequence_head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + sequence_head // kv_heads).to(tl.int64)
    head = sequence_head % kv_heads
    entries = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    pairs = tl.arange(0, BLOCK_PAIRS)
    tile_mask = (entries < kv_len)[:, None] & (pairs < PAIRS)[None, :]
    is_slow = pairs >= PACKED
    slow_mask = tile_mask & is_slow[None, :]
    entry = data + slot * data_slot + head * data_head + entries[:, None] * data_n

    codes = tl.load(entry + pairs[None, :] * data_byte, mask=tile_mask, other=0)
    slow_codes = tl.load(entry + (pairs + PAIRS - PACKED)[None, :] * data_byte, mask=slow_mask, other=0)
    slow_first, slow_second = codes.to(tl.int8, bitcast=True), slow_codes.to(tl.int8, bitcast=True)
    first = tl.where(is_slow[None, :], slow_first.to(tl.int32), (codes & 15).to(tl.int32) - 8)
    second = tl.where(is_slow[None, :], slow_second.to(tl.int32), (codes >> 4).to(tl.int32) - 8)

    # A scale has the upper three bytes of a float, or two, which the byte of an earlier number precedes.
    scale_at = tl.where(is_slow, SLOW_SCALE, GROUP_SCALES + GROUP_SCALE_BYTES * (pairs // GROUP_PAIRS) - 1)
    scale_bytes = entry + scale_at[None, :] * data_byte
    bits = tl.load(scale_bytes, mask=slow_mask, other=0).to(tl.int32) << 8
    bits |= tl.load(scale_bytes + data_byte, mask=tile_mask, other=0).to(tl.int32) << 16
    bits |= tl.load(scale_bytes + 2 * data_byte, mask=tile_mask, other=0).to(tl.int32) << 24
    scale = bits.to(tl.float32, bitcast=True)

    numbers = out + (sequence_head * kv_len + entries)[:, None] * (2 * PAIRS) + pairs[None, :]
    tl.store(numbers, (first.to(tl.float32) * scale).to(out.dtype.element_ty), tile_mask)
    tl.store(numbers + PAIRS, (second.to(tl.float32) * scale).to(out.dtype.element_ty), tile_mask)


def dequantize_int8_kv(
    quants: torch.Tensor, scales: torch.Tensor, slots: torch.Tensor, kv_len: int, dtype: torch.dtype
) -> torch.Tensor:
    """Launches :func:`dequantize_int8_kernel`; see :func:`longdraft.attention.quantized_kv.dequantize_int8_kv`."""
    batch_size, (_, kv_heads, _, d) = slots.shape[0], quants.shape
    out = torch.empty(batch_size, kv_heads, kv_len, d, dtype=dtype, device=quants.device)
    if not out.numel():
        return out
    block_d = triton.next_power_of_2(d)
    block_n = max(1, PROGRAM_ELEMENTS // block_d)
    with torch.cuda.device_of(quants):
        dequantize_int8_kernel[(triton.cdiv(kv_len, block_n), batch_size * kv_heads)](
            quants, scales, slots, out, kv_len, kv_heads, *quants.stride(), *scales.stride(),
            D=d, BLOCK_D=block_d, BLOCK_N=block_n, num_warps=4,
        )  # fmt: skip
    return out


def dequantize_int4_kv(
    data: torch.Tensor, slots: torch.Tensor, kv_len: int, head_dim: int, is_keys: bool, dtype: torch.dtype
) -> torch.Tensor:
    """Launches :func:`dequantize_int4_kernel`; see :func:`longdraft.attention.quantized_kv.dequantize_int4_kv`."""
    batch_size, kv_heads, layout = slots.shape[0], data.shape[1], Int4Layout(head_dim, is_keys)
    out = torch.empty(batch_size, kv_heads, kv_len, head_dim, dtype=dtype, device=data.device)
    if not out.numel():
        return out
    block_pairs = triton.next_power_of_2(layout.half)
    block_n = max(1, PROGRAM_ELEMENTS // (2 * block_pairs))
    with torch.cuda.device_of(data):
        dequantize_int4_kernel[(triton.cdiv(kv_len, block_n), batch_size * kv_heads)](
            data, slots, out, kv_len, kv_heads, *data.stride(),
            PAIRS=layout.half, PACKED=layout.packed, GROUP_SCALES=layout.group_scales, SLOW_SCALE=layout.slow_scale,
            GROUP_PAIRS=GROUP_PAIRS, GROUP_SCALE_BYTES=GROUP_SCALE_BYTES, BLOCK_PAIRS=block_pairs, BLOCK_N=block_n,
            num_warps=4,
        )  # fmt: skip
    return out
