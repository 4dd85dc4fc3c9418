"""Triton kernels for :mod:`.fixed_order`: whole tiles of the prefix, the rest of each row, and the join of splits.

All tiles have one size, whatever the number of rows, so that a product is the same instruction for each row. The
running sums of a split (maximum m, sum z, and acc, in base 2) lie in buffers (P, B*Hkv*R), (P, B*Hkv*R, d) between the
kernels, not normalised: going on from them is what one kernel would have done.
"""

# Triton reads the annotations of a kernel's parameters, so run-time parameters have none.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from longdraft.attention.fixed_order import SPLIT
from longdraft.attention.triton_kernels import (
    DOT_TYPES,
    LOG2_E,
    WARPS,
    key_tile,
    load_queries,
    load_tile,
    online_softmax,
    scores_of,
)
from longdraft.errors import CapabilityError

# Rows of a program that joins splits.
JOINED = 16


@triton.jit
def _store_sums(sums_m, sums_z, sums_acc, flat, ok, m, z, acc, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    dims = tl.arange(0, BLOCK_D)
    tl.store(sums_m + flat, m, mask=ok)
    tl.store(sums_z + flat, z, mask=ok)
    tl.store(
        sums_acc + flat[:, None] * HEAD_DIM + dims[None, :], acc, mask=ok[:, None] & (dims < HEAD_DIM)[None, :]
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def prefix_sums_kernel(
    q, k, v, slots, lengths, sums_m, sums_z, sums_acc, scale, T, kv_heads,
    q_b, q_head, q_t, q_d, k_slot, k_head, k_n, k_d, v_slot, v_head, v_n, v_d,
    SPLIT: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Sums of split p over the whole tiles of the prefix in ranks [p*SPLIT, (p+1)*SPLIT). Rows r = g*T + t of a KV
    head's group, as in :mod:`.triton_kernels`. Grid: (row tiles, B*Hkv, splits).
    """
    sequence_head = tl.program_id(1)
    split = tl.program_id(2)
    b = (sequence_head // kv_heads).to(tl.int64)
    h = (sequence_head % kv_heads).to(tl.int64)
    slot = tl.load(slots + b).to(tl.int64)
    full = tl.load(lengths + b) // BLOCK_N * BLOCK_N
    R = GROUP * T
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    q_tile = load_queries(q + b * q_b + h * GROUP * q_head, rows, T, q_head, q_t, q_d, R, HEAD_DIM, BLOCK_D)
    k_base = k + slot * k_slot + h * k_head
    v_base = v + slot * v_slot + h * v_head
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    z = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    hi = tl.minimum((split + 1) * SPLIT, full)
    for start in range(split * SPLIT, hi, BLOCK_N):
        ranks = start + tl.arange(0, BLOCK_N)
        at = ranks.to(tl.int64)
        ok = ranks < hi
        k_tile = load_tile(k_base, at * k_n, ok, k_d, HEAD_DIM, BLOCK_D)
        v_tile = load_tile(v_base, at * v_n, ok, v_d, HEAD_DIM, BLOCK_D)
        scores = scores_of(q_tile, k_tile, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), scale, DOT)
        scores = tl.where(ok[None, :], scores, float("-inf"))
        m, z, acc = online_softmax(m, z, acc, scores, v_tile, DOT)
    flat = (split.to(tl.int64) * tl.num_programs(1) + sequence_head) * R + rows
    _store_sums(sums_m, sums_z, sums_acc, flat, rows < R, m, z, acc, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=["T", "W"])
def path_sums_kernel(
    q, k, v, slots, lengths, paths, counts, sums_m, sums_z, sums_acc, scale, T, W, kv_heads,
    q_b, q_head, q_t, q_d, k_slot, k_head, k_n, k_d, v_slot, v_head, v_n, v_d,
    SPLIT: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Takes the rest of the prefix and the path of row t into the sums, tile by tile. Grid: (T, B*Hkv)."""
    t = tl.program_id(0).to(tl.int64)
    sequence_head = tl.program_id(1).to(tl.int64)
    b = sequence_head // kv_heads
    h = sequence_head % kv_heads
    slot = tl.load(slots + b).to(tl.int64)
    n = tl.load(lengths + b)
    end = n + tl.load(counts + b * T + t)
    g = tl.arange(0, BLOCK_M)
    ok_rows = g < GROUP
    dims = tl.arange(0, BLOCK_D)
    heads = q + b * q_b + h * GROUP * q_head + t * q_t
    q_tile = load_tile(heads, g.to(tl.int64) * q_head, ok_rows, q_d, HEAD_DIM, BLOCK_D)
    k_base = k + slot * k_slot + h * k_head
    v_base = v + slot * v_slot + h * v_head
    own = sequence_head * GROUP * T + g * T + t
    per_split = tl.num_programs(1).to(tl.int64) * GROUP * T
    first = n // BLOCK_N * BLOCK_N
    flat = (first // SPLIT).to(tl.int64) * per_split + own
    m = tl.load(sums_m + flat, mask=ok_rows, other=float("-inf"))
    z = tl.load(sums_z + flat, mask=ok_rows, other=0.0)
    in_acc = ok_rows[:, None] & (dims < HEAD_DIM)[None, :]
    acc = tl.load(sums_acc + flat[:, None] * HEAD_DIM + dims[None, :], mask=in_acc, other=0.0)
    for start in range(first, end, BLOCK_N):
        new = start % SPLIT == 0
        m = tl.where(new, float("-inf"), m)
        z = tl.where(new, 0.0, z)
        acc = tl.where(new, 0.0, acc)
        ranks = start + tl.arange(0, BLOCK_N)
        ok = ranks < end
        node = tl.load(paths + (b * T + t) * W + (ranks - n), mask=ok & (ranks >= n), other=0)
        at = tl.where(ranks < n, ranks, n + node).to(tl.int64)
        k_tile = load_tile(k_base, at * k_n, ok, k_d, HEAD_DIM, BLOCK_D)
        v_tile = load_tile(v_base, at * v_n, ok, v_d, HEAD_DIM, BLOCK_D)
        scores = scores_of(q_tile, k_tile, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), scale, DOT)
        scores = tl.where(ok[None, :], scores, float("-inf"))
        m, z, acc = online_softmax(m, z, acc, scores, v_tile, DOT)
        flat = start // SPLIT * per_split + own
        _store_sums(sums_m, sums_z, sums_acc, flat, ok_rows, m, z, acc, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=["parts", "N", "T"])
def join_kernel(
    sums_m, sums_z, sums_acc, out, parts, N, T, heads, out_b, out_head, out_t, out_d,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Joins the splits of each of N = B*Hq*T rows, one after another. An empty one adds zeros. Grid: (row tiles,)."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    dims = tl.arange(0, BLOCK_D)
    ok = rows < N
    in_acc = ok[:, None] & (dims < HEAD_DIM)[None, :]
    m = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    z = tl.zeros((BLOCK_R,), tl.float32)
    acc = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for p in range(parts):
        flat = p * N + rows
        m_p = tl.load(sums_m + flat, mask=ok, other=float("-inf"))
        z_p = tl.load(sums_z + flat, mask=ok, other=0.0)
        acc_p = tl.load(sums_acc + flat[:, None] * HEAD_DIM + dims[None, :], mask=in_acc, other=0.0)
        m_new = tl.maximum(m, m_p)
        reference = tl.where(m_new == float("-inf"), 0.0, m_new)
        before = tl.exp2(m - reference)
        now = tl.exp2(m_p - reference)
        z = z * before + z_p * now
        acc = acc * before[:, None] + acc_p * now[:, None]
        m = m_new
    places = rows // (heads * T) * out_b + (rows // T % heads) * out_head + (rows % T) * out_t
    tl.store(
        out + places[:, None] + dims.to(tl.int64)[None, :] * out_d,
        (acc / tl.where(z > 0.0, z, 1.0)[:, None]).to(out.dtype.element_ty),
        mask=in_acc,
    )


def fixed_order_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    prefix_lens: torch.Tensor,
    ancestors: torch.Tensor,
    num_ancestors: torch.Tensor,
    max_kv_len: int,
    scale: float,
) -> torch.Tensor:
    """Launches the kernels; see :func:`longdraft.attention.fixed_order.fixed_order_attention`."""
    (batch, heads, size, d), kv_heads = q.shape, keys.shape[1]
    out = torch.empty_like(q)
    if not out.numel():
        return out
    group, parts = heads // kv_heads, max_kv_len // SPLIT + 1
    tile, block_d = key_tile(q)
    if group > tile:  # a program of the path has one tile of them
        raise CapabilityError(
            f"deterministic=True takes up to {tile} query heads a KV head in {q.dtype} with head size {d}, this model "
            f"has {group}: leave it out."
        )
    sums_m, sums_z = torch.empty(2, parts, batch * heads * size, dtype=torch.float32, device=q.device)
    sums_acc = torch.empty(parts, batch * heads * size, d, dtype=torch.float32, device=q.device)
    sizes = {"GROUP": group, "HEAD_DIM": d, "BLOCK_D": block_d, "BLOCK_M": tile, "BLOCK_N": tile}
    how = {"SPLIT": SPLIT, "DOT": DOT_TYPES[q.dtype], "num_warps": WARPS, "num_stages": 2}
    strides = (*q.stride(), *keys.stride(), *values.stride())
    with torch.cuda.device_of(q):
        prefix_sums_kernel[(triton.cdiv(group * size, tile), batch * kv_heads, parts)](
            q, keys, values, slots, prefix_lens, sums_m, sums_z, sums_acc, scale * LOG2_E, size, kv_heads, *strides,
            **sizes, **how,
        )  # fmt: skip
        path_sums_kernel[(size, batch * kv_heads)](
            q, keys, values, slots, prefix_lens, ancestors, num_ancestors, sums_m, sums_z, sums_acc, scale * LOG2_E, size,
            ancestors.shape[2], kv_heads, *strides, **sizes, **how,
        )  # fmt: skip
        join_kernel[(triton.cdiv(batch * heads * size, JOINED),)](
            sums_m, sums_z, sums_acc, out, parts, batch * heads * size, size, heads, *out.stride(), HEAD_DIM=d,
            BLOCK_D=block_d, BLOCK_R=JOINED, num_warps=WARPS,
        )  # fmt: skip
    return out
