"""Triton kernels for :mod:`.fixed_order`: full tiles of the prefix, the rest of each token's keys, the merge of splits.

All tiles have one size, whatever the number of rows, so every row is multiplied by the same instruction. Between the
kernels, the running softmax of P splits (maximum m, sum z, and acc, in base 2, not normalised) lies in buffers
(P, B*Hkv*R) and (P, B*Hkv*R, d). The next kernel continues from there with the bits of a single kernel.
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

# Rows of one program of merge_splits_kernel.
MERGE_ROWS = 16


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
    q, k, v, slots, prefix_lens, sums_m, sums_z, sums_acc, scale, T, kv_heads,
    q_b, q_head, q_t, q_d, k_slot, k_head, k_n, k_d, v_slot, v_head, v_n, v_d,
    SPLIT: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Running softmax of split p over the full tiles of the prefix in ranks [p*SPLIT, (p+1)*SPLIT). Rows r = g*T + t of
    a KV head's group, as in :mod:`.triton_kernels`. Grid: (row tiles, B*Hkv, splits).
    """
    sequence_head = tl.program_id(1)
    split = tl.program_id(2)
    b = (sequence_head // kv_heads).to(tl.int64)
    h = (sequence_head % kv_heads).to(tl.int64)
    slot = tl.load(slots + b).to(tl.int64)
    prefix_end = tl.load(prefix_lens + b) // BLOCK_N * BLOCK_N
    R = GROUP * T
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    q_tile = load_queries(q + b * q_b + h * GROUP * q_head, rows, T, q_head, q_t, q_d, R, HEAD_DIM, BLOCK_D)
    k_base = k + slot * k_slot + h * k_head
    v_base = v + slot * v_slot + h * v_head
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    z = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    split_end = tl.minimum((split + 1) * SPLIT, prefix_end)
    for start in range(split * SPLIT, split_end, BLOCK_N):
        ranks = start + tl.arange(0, BLOCK_N)
        entry = ranks.to(tl.int64)
        ok = ranks < split_end
        k_tile = load_tile(k_base, entry * k_n, ok, k_d, HEAD_DIM, BLOCK_D)
        v_tile = load_tile(v_base, entry * v_n, ok, v_d, HEAD_DIM, BLOCK_D)
        scores = scores_of(q_tile, k_tile, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), scale, DOT)
        scores = tl.where(ok[None, :], scores, float("-inf"))
        m, z, acc = online_softmax(m, z, acc, scores, v_tile, DOT)
    flat = (split.to(tl.int64) * tl.num_programs(1) + sequence_head) * R + rows
    _store_sums(sums_m, sums_z, sums_acc, flat, rows < R, m, z, acc, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=["T", "W"])
def path_sums_kernel(
    q, k, v, slots, prefix_lens, ancestors, num_ancestors, sums_m, sums_z, sums_acc, scale, T, W, kv_heads,
    q_b, q_head, q_t, q_d, k_slot, k_head, k_n, k_d, v_slot, v_head, v_n, v_d,
    SPLIT: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Adds the rest of the prefix and the tree path of token t, tile by tile. Grid: (T, B*Hkv)."""
    t = tl.program_id(0).to(tl.int64)
    sequence_head = tl.program_id(1).to(tl.int64)
    b = sequence_head // kv_heads
    h = sequence_head % kv_heads
    slot = tl.load(slots + b).to(tl.int64)
    n = tl.load(prefix_lens + b)
    end = n + tl.load(num_ancestors + b * T + t)
    g = tl.arange(0, BLOCK_M)
    ok_rows = g < GROUP
    dims = tl.arange(0, BLOCK_D)
    q_base = q + b * q_b + h * GROUP * q_head + t * q_t
    q_tile = load_tile(q_base, g.to(tl.int64) * q_head, ok_rows, q_d, HEAD_DIM, BLOCK_D)
    k_base = k + slot * k_slot + h * k_head
    v_base = v + slot * v_slot + h * v_head
    sequence_row = sequence_head * GROUP * T + g * T + t
    per_split = tl.num_programs(1).to(tl.int64) * GROUP * T
    first = n // BLOCK_N * BLOCK_N
    flat = (first // SPLIT).to(tl.int64) * per_split + sequence_row
    m = tl.load(sums_m + flat, mask=ok_rows, other=float("-inf"))
    z = tl.load(sums_z + flat, mask=ok_rows, other=0.0)
    in_acc = ok_rows[:, None] & (dims < HEAD_DIM)[None, :]
    acc = tl.load(sums_acc + flat[:, None] * HEAD_DIM + dims[None, :], mask=in_acc, other=0.0)
    for start in range(first, end, BLOCK_N):
        new_split = start % SPLIT == 0
        m = tl.where(new_split, float("-inf"), m)
        z = tl.where(new_split, 0.0, z)
        acc = tl.where(new_split, 0.0, acc)
        ranks = start + tl.arange(0, BLOCK_N)
        ok = ranks < end
        node = tl.load(ancestors + (b * T + t) * W + (ranks - n), mask=ok & (ranks >= n), other=0)
        entry = tl.where(ranks < n, ranks, n + node).to(tl.int64)
        k_tile = load_tile(k_base, entry * k_n, ok, k_d, HEAD_DIM, BLOCK_D)
        v_tile = load_tile(v_base, entry * v_n, ok, v_d, HEAD_DIM, BLOCK_D)
        scores = scores_of(q_tile, k_tile, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), scale, DOT)
        scores = tl.where(ok[None, :], scores, float("-inf"))
        m, z, acc = online_softmax(m, z, acc, scores, v_tile, DOT)
        flat = start // SPLIT * per_split + sequence_row
        _store_sums(sums_m, sums_z, sums_acc, flat, ok_rows, m, z, acc, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=["num_splits", "N", "T"])
def merge_splits_kernel(
    sums_m, sums_z, sums_acc, out, num_splits, N, T, num_heads, out_b, out_head, out_t, out_d,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Merges the splits of each of N = B*Hq*T rows in order. An empty split adds zeros. Grid: (row tiles,)."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    dims = tl.arange(0, BLOCK_D)
    ok = rows < N
    in_acc = ok[:, None] & (dims < HEAD_DIM)[None, :]
    m = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    z = tl.zeros((BLOCK_R,), tl.float32)
    acc = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for p in range(num_splits):
        flat = p * N + rows
        m_p = tl.load(sums_m + flat, mask=ok, other=float("-inf"))
        z_p = tl.load(sums_z + flat, mask=ok, other=0.0)
        acc_p = tl.load(sums_acc + flat[:, None] * HEAD_DIM + dims[None, :], mask=in_acc, other=0.0)
        m_new = tl.maximum(m, m_p)
        reference = tl.where(m_new == float("-inf"), 0.0, m_new)
        decay = tl.exp2(m - reference)
        weight_p = tl.exp2(m_p - reference)
        z = z * decay + z_p * weight_p
        acc = acc * decay[:, None] + acc_p * weight_p[:, None]
        m = m_new
    out_offsets = rows // (num_heads * T) * out_b + (rows // T % num_heads) * out_head + (rows % T) * out_t
    tl.store(
        out + out_offsets[:, None] + dims.to(tl.int64)[None, :] * out_d,
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
    (batch_size, num_heads, query_len, d), kv_heads = q.shape, keys.shape[1]
    out = torch.empty_like(q)
    if not out.numel():
        return out
    group, num_splits = num_heads // kv_heads, max_kv_len // SPLIT + 1
    tile, block_d = key_tile(q)
    if group > tile:  # a program of path_sums_kernel has one tile of query heads
        raise CapabilityError(
            f"deterministic=True takes up to {tile} query heads a KV head in {q.dtype} with head size {d}, this model "
            f"has {group}: leave it out."
        )
    rows = batch_size * num_heads * query_len
    sums_m, sums_z = torch.empty(2, num_splits, rows, dtype=torch.float32, device=q.device)
    sums_acc = torch.empty(num_splits, rows, d, dtype=torch.float32, device=q.device)
    sizes = {"GROUP": group, "HEAD_DIM": d, "BLOCK_D": block_d, "BLOCK_M": tile, "BLOCK_N": tile}
    constants = {"SPLIT": SPLIT, "DOT": DOT_TYPES[q.dtype], "num_warps": WARPS, "num_stages": 2}
    strides = (*q.stride(), *keys.stride(), *values.stride())
    with torch.cuda.device_of(q):
        prefix_sums_kernel[(triton.cdiv(group * query_len, tile), batch_size * kv_heads, num_splits)](
            q, keys, values, slots, prefix_lens, sums_m, sums_z, sums_acc, scale * LOG2_E, query_len, kv_heads,
            *strides, **sizes, **constants,
        )  # fmt: skip
        path_sums_kernel[(query_len, batch_size * kv_heads)](
            q, keys, values, slots, prefix_lens, ancestors, num_ancestors, sums_m, sums_z, sums_acc, scale * LOG2_E,
            query_len, ancestors.shape[2], kv_heads, *strides, **sizes, **constants,
        )  # fmt: skip
        merge_splits_kernel[(triton.cdiv(rows, MERGE_ROWS),)](
            sums_m, sums_z, sums_acc, out, num_splits, rows, query_len, num_heads, *out.stride(),
            HEAD_DIM=d, BLOCK_D=block_d, BLOCK_R=MERGE_ROWS, num_warps=WARPS,
        )  # fmt: skip
    return out
