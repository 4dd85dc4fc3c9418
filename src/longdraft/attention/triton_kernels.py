"""Building blocks of our Triton attention kernels: tiles, and the online softmax over them.

Rows are the G = Hq/Hkv query heads of one KV head, folded: row r = g*T + t, R = G*T of them. The G heads read the same
keys, so a tile of keys and values is loaded once for all of them. Scores are in base 2, because the hardware has exp2.
Offsets are int64, because slot * stride exceeds 2^31 in a large cache.
"""

# Triton reads the annotations of a kernel's parameters, so run-time parameters have none.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

# Bytes of an element -> elements of a tile. In 16 bits a tile of q and two stages each of K and V take 80 KiB of shared
# memory, which fits every GPU since Ampere, and twice the large ones. float32 has no exact tensor core: its operands
# pass through registers, which larger tiles would spill.
TILE_ELEMENTS = {2: 8192, 4: 2048}
MAX_TILE_ROWS = 64
WARPS = 4

LOG2_E = math.log2(math.e)


@triton.jit
def load_tile(ptr, row_offsets, row_ok, stride_d, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """(rows, BLOCK_D) tile; zero in rows that are not ok and in the padding of the head size."""
    dims = tl.arange(0, BLOCK_D)
    ok = row_ok[:, None] & (dims < HEAD_DIM)[None, :]
    return tl.load(ptr + row_offsets[:, None] + dims.to(tl.int64)[None, :] * stride_d, mask=ok, other=0.0)


@triton.jit
def load_queries(q, rows, T, q_head, q_t, q_d, R, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows r = g*T + t of one KV head's group; ``q`` points at (b, first head of the group)."""
    offsets = (rows // T).to(tl.int64) * q_head + (rows % T).to(tl.int64) * q_t
    return load_tile(q, offsets, rows < R, q_d, HEAD_DIM, BLOCK_D)


@triton.jit
def _dot(a, b, acc, DOT: tl.constexpr):
    """acc + a @ b. DOT is the operands' own type, but float32 where the interpreter cannot multiply it."""
    return tl.dot(a.to(DOT), b.to(DOT), acc, input_precision="ieee")


@triton.jit
def scores_of(q_tile, k_tile, acc, scale, DOT: tl.constexpr):
    """q k^T scale; the scale includes log2 e, so that the result is in base 2."""
    return _dot(q_tile, tl.trans(k_tile), acc, DOT) * scale


@triton.jit
def online_softmax(m, z, acc, scores, v, DOT: tl.constexpr):
    """Adds a tile of keys to running maximum m, running sum z = sum 2^(s - m), and acc = sum 2^(s - m) v."""
    m_new = tl.maximum(m, tl.max(scores, axis=1))
    # A fully masked row has m = -inf, and -inf - -inf is NaN. Any finite reference avoids that.
    reference = tl.where(m_new == float("-inf"), 0.0, m_new)
    decay = tl.exp2(m - reference)
    p = tl.exp2(scores - reference[:, None])
    z = z * decay + tl.sum(p, axis=1)
    acc = _dot(p.to(v.dtype), v, acc * decay[:, None], DOT)
    return m_new, z, acc


DOT_TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    # Triton's interpreter multiplies bfloat16 as if its bits were integers, so it uses exact float32 products.
    torch.bfloat16: tl.bfloat16 if isinstance(load_tile, triton.JITFunction) else tl.float32,
}


def key_tile(q: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of a tile of keys for queries (..., d): powers of two, at least 16 as tl.dot requires."""
    block_d = max(16, triton.next_power_of_2(q.shape[-1]))
    return max(16, min(MAX_TILE_ROWS, TILE_ELEMENTS[q.element_size()] // block_d)), block_d
