"""Triton kernels for :mod:`.fixed_order`, which run in this order: prefix_attention, path_attention, merge_splits.

Each split of the keys has a softmax of its own: m, z and acc of :func:`.triton_kernels.online_softmax`. Float32 buffers
hold them for all splits and rows: split_m and split_z (splits, B*Hkv*R), split_acc (splits, B*Hkv*R, d). DOT is the
type of tl.dot's operands; other letters, such as R, are those of :mod:`.triton_kernels`. Keys are added up in a fixed
order, in tiles of one size, so a token gets equal bits in any batch, and in a tree as in plain decoding.
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

MERGE_ROWS = 16  # rows of one program of merge_splits_kernel


@triton.jit
def _store_split(split_m, split_z, split_acc, rows, row_mask, m, z, acc, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    dims = tl.arange(0, BLOCK_D)
    tl.store(split_m + rows, m, mask=row_mask)
    tl.store(split_z + rows, z, mask=row_mask)
    tl.store(
        split_acc + rows[:, None] * HEAD_DIM + dims[None, :], acc, mask=row_mask[:, None] & (dims < HEAD_DIM)[None, :]
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def prefix_attention_kernel(
    q, k, v, slots, prefix_lens, split_m, split_z, split_acc, scale, T, kv_heads,
    q_b, q_head, q_t, q_d, k_slot, k_head, k_n, k_d, v_slot, v_head, v_n, v_d,
    SPLIT: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Computes the softmax of one split for a tile of rows, over the full tiles of the prefix in the split.
    Grid: (row tiles, B*Hkv, splits)."""
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
        key_indices = start + tl.arange(0, BLOCK_N)
        entry = key_indices.to(tl.int64)
        key_mask = key_indices < split_end
        k_tile = load_tile(k_base, entry * k_n, key_mask, k_d, HEAD_DIM, BLOCK_D)
        v_tile = load_tile(v_base, entry * v_n, key_mask, v_d, HEAD_DIM, BLOCK_D)
        scores = scores_of(q_tile, k_tile, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), scale, DOT)
        scores = tl.where(key_mask[None, :], scores, float("-inf"))
        m, z, acc = online_softmax(m, z, acc, scores, v_tile, DOT)
    flat_rows = (split.to(tl.int64) * tl.num_programs(1) + sequence_head) * R + rows
    _store_split(split_m, split_z, split_acc, flat_rows, rows < R, m, z, acc, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=["T", "tree_len"])
def path_attention_kernel(
    q, k, v, slots, prefix_lens, paths, path_lens, split_m, split_z, split_acc, scale, T, tree_len, kv_heads,
    q_b, q_head, q_t, q_d, k_slot, k_head, k_n, k_d, v_slot, v_head, v_n, v_d,
    SPLIT: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Adds token t's other keys to its splits: the prefix's last, partial tile, and t's tree path. Grid: (T, B*Hkv)."""
    t = tl.program_id(0).to(tl.int64)
    sequence_head = tl.program_id(1).to(tl.int64)
    b = sequence_head // kv_heads
    h = sequence_head % kv_heads
    slot = tl.load(slots + b).to(tl.int64)
    prefix_len = tl.load(prefix_lens + b)
    end = prefix_len + tl.load(path_lens + b * T + t)
    g = tl.arange(0, BLOCK_M)
    row_mask = g < GROUP
    dims = tl.arange(0, BLOCK_D)
    q_base = q + b * q_b + h * GROUP * q_head + t * q_t
    q_tile = load_tile(q_base, g.to(tl.int64) * q_head, row_mask, q_d, HEAD_DIM, BLOCK_D)
    k_base = k + slot * k_slot + h * k_head
    v_base = v + slot * v_slot + h * v_head
    row_in_split = sequence_head * GROUP * T + g * T + t
    rows_per_split = tl.num_programs(1).to(tl.int64) * GROUP * T
    first_index = prefix_len // BLOCK_N * BLOCK_N
    flat_rows = (first_index // SPLIT).to(tl.int64) * rows_per_split + row_in_split
    m = tl.load(split_m + flat_rows, mask=row_mask, other=float("-inf"))
    z = tl.load(split_z + flat_rows, mask=row_mask, other=0.0)
    acc_mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
    acc = tl.load(split_acc + flat_rows[:, None] * HEAD_DIM + dims[None, :], mask=acc_mask, other=0.0)
    for start in range(first_index, end, BLOCK_N):
        begins_split = start % SPLIT == 0
        m = tl.where(begins_split, float("-inf"), m)
        z = tl.where(begins_split, 0.0, z)
        acc = tl.where(begins_split, 0.0, acc)
        key_indices = start + tl.arange(0, BLOCK_N)
        key_mask = key_indices < end
        path_offsets = (b * T + t) * tree_len + (key_indices - prefix_len)
        node = tl.load(paths + path_offsets, mask=key_mask & (key_indices >= prefix_len), other=0)
        entry = tl.where(key_indices < prefix_len, key_indices, prefix_len + node).to(tl.int64)
        k_tile = load_tile(k_base, entry * k_n, key_mask, k_d, HEAD_DIM, BLOCK_D)
        v_tile = load_tile(v_base, entry * v_n, key_mask, v_d, HEAD_DIM, BLOCK_D)
        scores = scores_of(q_tile, k_tile, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), scale, DOT)
        scores = tl.where(key_mask[None, :], scores, float("-inf"))
        m, z, acc = online_softmax(m, z, acc, scores, v_tile, DOT)
        flat_rows = start // SPLIT * rows_per_split + row_in_split
        _store_split(split_m, split_z, split_acc, flat_rows, row_mask, m, z, acc, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=["num_splits", "num_rows", "T"])
def merge_splits_kernel(
    split_m, split_z, split_acc, out, num_splits, num_rows, T, num_heads, out_b, out_head, out_t, out_d,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Merges the splits of num_rows = B*Hq*T rows in order. An empty split adds zeros. Grid: (row tiles,)."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    dims = tl.arange(0, BLOCK_D)
    row_mask = rows < num_rows
    acc_mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
    m = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    z = tl.zeros((BLOCK_R,), tl.float32)
    acc = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for p in range(num_splits):
        flat_rows = p * num_rows + rows
        m_p = tl.load(split_m + flat_rows, mask=row_mask, other=float("-inf"))
        z_p = tl.load(split_z + flat_rows, mask=row_mask, other=0.0)
        acc_p = tl.load(split_acc + flat_rows[:, None] * HEAD_DIM + dims[None, :], mask=acc_mask, other=0.0)
        m_new = tl.maximum(m, m_p)
        finite_max = tl.where(m_new == float("-inf"), 0.0, m_new)
        decay = tl.exp2(m - finite_max)
        weight_p = tl.exp2(m_p - finite_max)
        z = z * decay + z_p * weight_p
        acc = acc * decay[:, None] + acc_p * weight_p[:, None]
        m = m_new
    out_offsets = rows // (num_heads * T) * out_b + (rows // T % num_heads) * out_head + (rows % T) * out_t
    tl.store(
        out + out_offsets[:, None] + dims.to(tl.int64)[None, :] * out_d,
        (acc / tl.where(z > 0.0, z, 1.0)[:, None]).to(out.dtype.element_ty),
        mask=acc_mask,
    )


def fixed_order_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    prefix_lens: torch.Tensor,
    paths: torch.Tensor,
    path_lens: torch.Tensor,
    max_kv_len: int,
    scale: float,
) -> torch.Tensor:
    """Launches the kernels; see :func:`longdraft.attention.fixed_order.fixed_order_attention`."""
    (batch_size, num_heads, query_len, d), kv_heads = q.shape, keys.shape[1]
    out = torch.empty_like(q)
    if not out.numel():
        return out
    group, num_splits = num_heads // kv_heads, max_kv_len // SPLIT + 1
    tile_len, block_d = key_tile(q)
    if group > tile_len:  # a program of path_attention_kernel has one tile of query heads
        raise CapabilityError(
            f"deterministic=True takes up to {tile_len} query heads a KV head in {q.dtype} with head size {d}, this "
            f"model has {group}. Do not set deterministic=True."
        )
    rows = batch_size * num_heads * query_len
    split_m, split_z = torch.empty(2, num_splits, rows, dtype=torch.float32, device=q.device)
    split_acc = torch.empty(num_splits, rows, d, dtype=torch.float32, device=q.device)
    sizes = {"GROUP": group, "HEAD_DIM": d, "BLOCK_D": block_d, "BLOCK_M": tile_len, "BLOCK_N": tile_len}
    constants = {"SPLIT": SPLIT, "DOT": DOT_TYPES[q.dtype], "num_warps": WARPS, "num_stages": 2}
    strides = (*q.stride(), *keys.stride(), *values.stride())
    with torch.cuda.device_of(q):
        prefix_attention_kernel[(triton.cdiv(group * query_len, tile_len), batch_size * kv_heads, num_splits)](
            q, keys, values, slots, prefix_lens, split_m, split_z, split_acc, scale * LOG2_E, query_len, kv_heads,
            *strides, **sizes, **constants,
        )  # fmt: skip
        path_attention_kernel[(query_len, batch_size * kv_heads)](
            q, keys, values, slots, prefix_lens, paths, path_lens, split_m, split_z, split_acc, scale * LOG2_E,
            query_len, paths.shape[2], kv_heads, *strides, **sizes, **constants,
        )  # fmt: skip
        merge_splits_kernel[(triton.cdiv(rows, MERGE_ROWS),)](
            split_m, split_z, split_acc, out, num_splits, rows, query_len, num_heads, *out.stride(),
            HEAD_DIM=d, BLOCK_D=block_d, BLOCK_R=MERGE_ROWS, num_warps=WARPS,
        )  # fmt: skip
    return out
