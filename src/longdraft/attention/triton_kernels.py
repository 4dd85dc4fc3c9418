"""Building blocks of our Triton attention kernels: tiles, and the online softmax over tiles of keys.

B sequences have T new tokens each, Hq query heads and Hkv KV heads of size d. The G = Hq/Hkv query heads of a KV head
make R = G*T rows: row g*T + t is head g, token t. So a tile of keys and values is loaded once for all rows. Scores are
in base 2, because the hardware has exp2. Offsets are int64, because slot * stride exceeds 2^31 in a large cache. A
parameter such as q_head is the stride of q's dimension "head". Dimensions: b (sequence), head, t (token), slot, n (KV
entry), d (element), i and j (query and key in a tree). A tile has BLOCK_M rows or BLOCK_N keys of BLOCK_D elements.
"""

# Triton reads the annotations of a kernel's parameters, so run-time parameters have none.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

# Bytes of an element -> elements of a tile. In 16 bits a tile of q, and two stages of K and V, take 80 KiB of shared
# memory: an SM of every GPU since Ampere holds one such program, of a large GPU two. In float32, exact products do not
# run on tensor cores: their operands are in registers, which would not hold larger tiles.
TILE_ELEMENTS = {2: 8192, 4: 2048}
MAX_TILE_ROWS = 64
WARPS = 4

LOG2_E = math.log2(math.e)


@triton.jit
def load_tile(ptr, row_offsets, row_mask, stride_d, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Loads a (rows, BLOCK_D) tile: 0 in rows where row_mask is False, and in the padding from HEAD_DIM to BLOCK_D."""
    dims = tl.arange(0, BLOCK_D)
    mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
    return tl.load(ptr + row_offsets[:, None] + dims.to(tl.int64)[None, :] * stride_d, mask=mask, other=0.0)


@triton.jit
def load_queries(q, rows, T, q_head, q_t, q_d, R, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Loads the queries of ``rows`` of a KV head. ``q`` points at the KV head's first query head in a sequence."""
    offsets = (rows // T).to(tl.int64) * q_head + (rows % T).to(tl.int64) * q_t
    return load_tile(q, offsets, rows < R, q_d, HEAD_DIM, BLOCK_D)


@triton.jit
def _dot(a, b, acc, DOT: tl.constexpr):
    """Returns acc + a @ b, multiplied in the type DOT, which :data:`DOT_TYPES` gives."""
    return tl.dot(a.to(DOT), b.to(DOT), acc, input_precision="ieee")


@triton.jit
def scores_of(q_tile, k_tile, acc, scale, DOT: tl.constexpr):
    """Returns the scores q k^T scale, in base 2: the scale includes log2 e."""
    return _dot(q_tile, tl.trans(k_tile), acc, DOT) * scale


@triton.jit
def online_softmax(m, z, acc, scores, v, DOT: tl.constexpr):
    """Adds a tile of keys to m (the maximum of the scores s), z = sum 2^(s - m) and acc = sum 2^(s - m) v."""
    m_new = tl.maximum(m, tl.max(scores, axis=1))
    # A fully masked row has m = -inf, and -inf - -inf is NaN. Any finite maximum avoids this.
    finite_max = tl.where(m_new == float("-inf"), 0.0, m_new)
    decay = tl.exp2(m - finite_max)
    weights = tl.exp2(scores - finite_max[:, None])
    z = z * decay + tl.sum(weights, axis=1)
    acc = _dot(weights.to(v.dtype), v, acc * decay[:, None], DOT)
    return m_new, z, acc


DOT_TYPES = {  # type of queries and keys -> type of the operands of tl.dot
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    # Triton's interpreter multiplies bfloat16 as if its bits were integers, so it uses exact float32 products.
    torch.bfloat16: tl.bfloat16 if isinstance(load_tile, triton.JITFunction) else tl.float32,
}


def key_tile(q: torch.Tensor) -> tuple[int, int]:
    """Returns (rows, columns) of a tile of keys for queries (..., d): powers of two, at least 16 as tl.dot requires."""
    block_d = max(16, triton.next_power_of_2(q.shape[-1]))
    return max(16, min(MAX_TILE_ROWS, TILE_ELEMENTS[q.element_size()] // block_d)), block_d
