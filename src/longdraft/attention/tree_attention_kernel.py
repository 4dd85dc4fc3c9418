"""A Triton kernel that attends to a tree and merges the prefix's result, in one launch (LongSpec, section 3.3).

The online softmax over the tree begins with the prefix's log-sum-exp and output: no further step merges them.
"""

# Triton reads the annotations of a kernel's parameters, so run-time parameters have none.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

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

# Rows of a tile of queries. A tree has few keys, and small tiles make more programs, which keep a GPU busy.
TILE_ROWS = 16
LOG2_E_CONST = tl.constexpr(LOG2_E)  # kernels read only constexpr globals


@triton.jit(do_not_specialize=["T", "tree_len"])  # else new sizes would be compiled while decoding
def tree_attention_kernel(
    q, k, v, o, lse, prefix_lens, tree_indices, tree_bias, out, scale, T, tree_len, kv_heads,
    q_b, q_head, q_t, q_d, k_head, k_n, v_head, v_n, o_b, o_head, o_t, o_d, lse_b, lse_head, lse_t,
    bias_b, bias_i, bias_j, out_b, out_head, out_t, out_d,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Computes the attention of a tile of rows (letters: see :mod:`.triton_kernels`) to the tree and the prefix.
    Grid: (row tiles, B*Hkv)."""
    sequence_head = tl.program_id(1)
    b = (sequence_head // kv_heads).to(tl.int64)
    h = (sequence_head % kv_heads).to(tl.int64)
    R = GROUP * T
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = rows < R
    g = (rows // T).to(tl.int64)
    i = (rows % T).to(tl.int64)
    first_head = h * GROUP

    q_tile = load_queries(q + b * q_b + first_head * q_head, rows, T, q_head, q_t, q_d, R, HEAD_DIM, BLOCK_D)
    prefix_out = load_queries(o + b * o_b + first_head * o_head, rows, T, o_head, o_t, o_d, R, HEAD_DIM, BLOCK_D)
    # The prefix attention's results for an empty prefix are undefined.
    is_empty = tl.load(prefix_lens + b) == 0
    acc = tl.where(is_empty, 0.0, prefix_out.to(tl.float32))
    lse_ptr = lse + b * lse_b + (first_head + g) * lse_head + i * lse_t
    m = tl.where(is_empty, float("-inf"), tl.load(lse_ptr, mask=row_mask, other=float("-inf")) * LOG2_E_CONST)
    z = tl.where(m == float("-inf"), 0.0, 1.0)  # the prefix's weight 2^(m - m) = 1; 0 if it is empty
    for start in range(0, tree_len, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        key_mask = j < tree_len
        entry = tl.load(tree_indices + b * tree_len + j, mask=key_mask, other=0).to(tl.int64)
        k_tile = load_tile(k + h * k_head, entry * k_n, key_mask, 1, HEAD_DIM, BLOCK_D)
        v_tile = load_tile(v + h * v_head, entry * v_n, key_mask, 1, HEAD_DIM, BLOCK_D)
        scores = scores_of(q_tile, k_tile, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), scale, DOT)
        offsets = b * bias_b + i[:, None] * bias_i + j[None, :] * bias_j
        scores += tl.load(tree_bias + offsets, mask=row_mask[:, None] & key_mask[None, :], other=float("-inf"))
        m, z, acc = online_softmax(m, z, acc, scores, v_tile, DOT)

    dims = tl.arange(0, BLOCK_D)
    out_offsets = b * out_b + (first_head + g) * out_head + i * out_t
    tl.store(
        out + out_offsets[:, None] + dims[None, :] * out_d,
        (acc / tl.where(z > 0.0, z, 1.0)[:, None]).to(out.dtype.element_ty),
        mask=row_mask[:, None] & (dims < HEAD_DIM)[None, :],
    )


def merge_tree_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    prefix_lens: torch.Tensor,
    tree_indices: torch.Tensor,
    tree_bias: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Launches :func:`tree_attention_kernel`; see :func:`longdraft.attention.tree_attention.merge_tree_attention`."""
    (batch_size, heads, query_len, d), kv_heads, tree_len = q.shape, keys.shape[1], tree_bias.shape[-1]
    group = heads // kv_heads
    out = q.new_empty(batch_size, query_len, heads, d).transpose(1, 2)
    if not out.numel():
        return out
    block_n, block_d = key_tile(q)
    with torch.cuda.device_of(q):
        tree_attention_kernel[(triton.cdiv(group * query_len, TILE_ROWS), batch_size * kv_heads)](
            q, keys, values, o, lse, prefix_lens, tree_indices, tree_bias, out, scale * LOG2_E, query_len, tree_len,
            kv_heads, *q.stride(), *keys.stride()[1:3], *values.stride()[1:3], *o.stride(), *lse.stride(),
            *(tree_bias.stride(axis) for axis in (0, 3, 4)), *out.stride(), GROUP=group, HEAD_DIM=d, BLOCK_D=block_d,
            BLOCK_M=TILE_ROWS, BLOCK_N=block_n, DOT=DOT_TYPES[q.dtype], num_warps=WARPS, num_stages=2,
        )  # fmt: skip
    return out
