"""A Triton kernel that dequantizes an int8 KV cache: reads each entry once, writes it once in the layer's dtype."""

# Triton reads the annotations of a kernel's parameters, so run-time parameters have none.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Elements of one program.
PROGRAM_ELEMENTS = 8192


@triton.jit(do_not_specialize=["kv_len"])  # or new lengths (1, multiples of 16) would compile while decoding
def dequantize_kernel(
    quantized, scales, slots, out, kv_len, heads, n_slot, n_head, n_entry, n_d, s_slot, s_head, s_entry,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Dequantizes a tile of entries of one KV head of one sequence. Grid: (tiles, B*Hkv)."""
    sequence_head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + sequence_head // heads).to(tl.int64)
    head = sequence_head % heads
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    ok = n < kv_len
    tile = ok[:, None] & (dims < D)[None, :]
    at = slot * n_slot + head * n_head + n[:, None] * n_entry + dims[None, :] * n_d
    x = tl.load(quantized + at, mask=tile, other=0).to(tl.float32)
    scale = tl.load(scales + slot * s_slot + head * s_head + n * s_entry, mask=ok, other=0.0)
    out_offsets = (sequence_head * kv_len + n)[:, None] * D + dims[None, :]
    tl.store(out + out_offsets, (x * scale[:, None]).to(out.dtype.element_ty), tile)


def dequantize_kv(
    quantized: torch.Tensor, scales: torch.Tensor, slots: torch.Tensor, kv_len: int, dtype: torch.dtype
) -> torch.Tensor:
    """Launches :func:`dequantize_kernel`; see :func:`longdraft.attention.int8_kv.dequantize_kv`."""
    batch_size, (_, heads, _, d) = slots.shape[0], quantized.shape
    out = torch.empty(batch_size, heads, kv_len, d, dtype=dtype, device=quantized.device)
    if not out.numel():
        return out
    block_d = triton.next_power_of_2(d)
    block_n = max(1, PROGRAM_ELEMENTS // block_d)
    with torch.cuda.device_of(quantized):
        dequantize_kernel[(triton.cdiv(kv_len, block_n), batch_size * heads)](
            quantized, scales, slots, out, kv_len, heads, *quantized.stride(), *scales.stride(),
            D=d, BLOCK_D=block_d, BLOCK_N=block_n, num_warps=4,
        )  # fmt: skip
    return out
