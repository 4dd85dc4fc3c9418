"""Triton kernels for hybrid tree attention (LongSpec section 3.3), the prefix split as in flash-decoding.

There are two kernels: one for a part, which is a split of the prefix (no mask) or the tree (its mask), and the merge of
all parts by log-sum-exp. Notation, per sequence b and KV head h:

    rows    the G = Hq/Hkv query heads of one KV head, folded: row r = g*T + t, R = G*T of them. The G heads
            read the same keys, so each key and value tile is loaded once for all of them.
    part p  one piece of the keys. Its normalised output o_p and log-sum-exp l_p, both float32, are written to
            buffers (P, B*Hkv*R, d) and (P, B*Hkv*R): folding keeps the order of a (P, B, Hq, T, d) tensor.

Scores are in base 2 (the scale includes log2 e, or the cap does), because the hardware has exp2; the stored log-sum-exp
is natural. With WINDOWED, row i of sequence b sees keys from rank begins[b, i] on. With SCALED, keys and values are
whole numbers of eight bits, and each row has a factor. Offsets are int64, because slot * stride exceeds 2^31 in a large
cache.
"""

# Triton reads the annotations of a kernel's parameters, so run-time parameters have none.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_tile(ptr, row_offsets, row_ok, stride_d, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """(rows, BLOCK_D) tile; zero in rows that are not ok and in the padding of the head size."""
    dims = tl.arange(0, BLOCK_D)
    ok = row_ok[:, None] & (dims < HEAD_DIM)[None, :]
    return tl.load(ptr + row_offsets[:, None] + dims.to(tl.int64)[None, :] * stride_d, mask=ok, other=0.0)


@triton.jit
def load_rows(
    rows, scales, at, stride_n, ok, stride_d,
    SCALED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Rows ``at`` of one KV head's keys or values, a tile as of :func:`load_tile`; with SCALED times their factors."""
    tile = load_tile(rows, at * stride_n, ok, stride_d, HEAD_DIM, BLOCK_D)
    if SCALED:
        factors = tl.load(scales + at, mask=ok, other=0.0)
        tile = (tile.to(tl.float32) * factors[:, None]).to(DOT)
    return tile


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
def scores_of(q_tile, k_tile, acc, scale, cap, CAPPED: tl.constexpr, DOT: tl.constexpr):
    """q k^T scale, or cap tanh(q k^T scale): the host chooses both numbers so that the result is in base 2."""
    scores = _dot(q_tile, tl.trans(k_tile), acc, DOT) * scale
    if CAPPED:
        # The difference would lose the digits of small numbers: x + x^3 P(x^2) there, as in native/vectors.h.
        z = scores * scores
        p = (((-5.7049873e-3 * z + 2.0639088e-2) * z - 5.3739715e-2) * z + 1.3331442e-1) * z - 3.3333280e-1
        far = 1.0 - 2.0 / (1.0 + tl.exp2(2.8853900817779268 * scores))
        scores = cap * tl.where(z < 0.39, scores * z * p + scores, far)
    return scores


@triton.jit
def online_softmax(m, z, acc, scores, v, DOT: tl.constexpr):
    """One key tile: running maximum m, running sum z = sum 2^(s - m), and acc = sum 2^(s - m) v."""
    m_new = tl.maximum(m, tl.max(scores, axis=1))
    # A row that has seen nothing yet has m = -inf, and -inf - -inf is NaN. Any finite reference avoids that.
    reference = tl.where(m_new == float("-inf"), 0.0, m_new)
    decay = tl.exp2(m - reference)
    p = tl.exp2(scores - reference[:, None])
    z = z * decay + tl.sum(p, axis=1)
    acc = _dot(p.to(v.dtype), v, acc * decay[:, None], DOT)
    return m_new, z, acc


@triton.jit
def part_kernel(
    q, k, v, k_scales, v_scales, mask, slots, lengths, begins, o, lse, scale, cap, T, offset, kv_heads, num_splits,
    q_b, q_head, q_t, q_d, k_slot, k_head, k_n, k_d, v_slot, v_head, v_n, v_d, s_slot, s_head, mask_b, mask_i, mask_j,
    TREE: tl.constexpr, CAUSAL: tl.constexpr, SCALED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Part p is one split of the prefix, or with TREE the tree behind it. Grid: (row tiles, B*Hkv, splits).

    A split's bounds follow from the sequence's own length on the device, not from the longest one. So a ragged
    batch is split evenly, and a recorded graph stays right while the lengths grow. Keys before a tile's first begin
    are not read.

    The tree has offset + T rows, the first at cache row lengths[b]; row i of the block is row offset + i of the tree.
    Without CAUSAL it sees row j of the tree if the mask (uint8) allows it, which contains ``begins``. ``o`` and ``lse``
    point at the first part that is written.
    """
    sequence_head = tl.program_id(1)
    split = tl.program_id(2)
    b = (sequence_head // kv_heads).to(tl.int64)
    h = (sequence_head % kv_heads).to(tl.int64)
    slot = tl.load(slots + b).to(tl.int64)
    n = tl.load(lengths + b)
    R = GROUP * T

    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    i = rows % T  # the query's row in the block, for every head of the group
    base = n.to(tl.int64) if TREE else 0  # keys are counted from here
    if CAUSAL:
        end = offset + tl.max(i, axis=0) + 1  # no row of this tile sees beyond itself
    elif TREE:
        end = offset + T
    else:
        end = n
    lo = 0
    if WINDOWED:
        begin = tl.load(begins + b * T + i, mask=rows < R, other=2147483647)
        if TREE:
            begin -= n
        lo = tl.maximum(tl.minimum(tl.min(begin, axis=0), end), 0) // BLOCK_N * BLOCK_N
    if not TREE:
        chunk = tl.cdiv(tl.cdiv(n - lo, num_splits), BLOCK_N) * BLOCK_N
        lo += split * chunk
        end = tl.minimum(lo + chunk, n)

    q_tile = load_queries(q + b * q_b + h * GROUP * q_head, rows, T, q_head, q_t, q_d, R, HEAD_DIM, BLOCK_D)
    k_base = k + slot * k_slot + h * k_head + base * k_n
    v_base = v + slot * v_slot + h * v_head + base * v_n
    of_scales = slot * s_slot + h * s_head + base
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    z = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(lo, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        at = keys.to(tl.int64)
        ok = keys < (offset + T if TREE else end)
        k_tile = load_rows(k_base, k_scales + of_scales, at, k_n, ok, k_d, SCALED, HEAD_DIM, BLOCK_D, DOT)
        v_tile = load_rows(v_base, v_scales + of_scales, at, v_n, ok, v_d, SCALED, HEAD_DIM, BLOCK_D, DOT)
        sees = ok[None, :]
        if CAUSAL:
            sees = sees & (keys[None, :] <= offset + i[:, None])
        elif TREE:
            # int32 suffices within one sequence's mask; int64 offsets would take a tile of registers.
            offsets = i[:, None] * mask_i + keys[None, :] * mask_j
            sees = tl.load(mask + b * mask_b + offsets, mask=sees & (rows < R)[:, None], other=0) != 0
        if WINDOWED:
            sees = sees & (keys[None, :] >= begin[:, None])
        scores = scores_of(q_tile, k_tile, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), scale, cap, CAPPED, DOT)
        m, z, acc = online_softmax(m, z, acc, tl.where(sees, scores, float("-inf")), v_tile, DOT)

    # o_p = acc / z and l_p = log sum exp s; o_p = 0 and l_p = -inf for a row that saw no key.
    total = tl.where(z > 0.0, z, 1.0)  # for such a row m = -inf gives l_p
    part = sequence_head.to(tl.int64) if TREE else split.to(tl.int64) * tl.num_programs(1) + sequence_head
    flat = part * R + rows
    dims = tl.arange(0, BLOCK_D)
    tl.store(lse + flat, (m + tl.log2(total)) * LN2, mask=rows < R)
    tl.store(
        o + flat[:, None] * HEAD_DIM + dims[None, :],
        acc / total[:, None],
        mask=(rows < R)[:, None] & (dims < HEAD_DIM)[None, :],
    )


@triton.jit
def merge_kernel(
    o_parts, lse_parts, out, sinks, parts, N, T, heads, out_b, out_head, out_t, out_d,
    WITH_SINKS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """l = log(sum_p exp(l_p)), o = sum_p exp(l_p - l) o_p over the N = B*Hq*T rows. Grid: (row tiles,).

    All parts of a row are loaded at once: a loop would wait for memory once for each part. A head's sink is one more
    part, whose output is 0.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    p = tl.arange(0, BLOCK_P)
    dims = tl.arange(0, BLOCK_D)
    ok = (rows < N)[:, None] & (p < parts)[None, :]
    flat = p.to(tl.int64)[None, :] * N + rows[:, None]

    l_p = tl.load(lse_parts + flat, mask=ok, other=float("-inf"))
    top = tl.max(l_p, axis=1)
    if WITH_SINKS:
        sink = tl.load(sinks + rows // T % heads, mask=rows < N, other=float("-inf"))
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)  # no part saw anything: every weight is exp(-inf) = 0
    weights = tl.exp(l_p - top[:, None])
    total = tl.sum(weights, axis=1)
    if WITH_SINKS:
        total += tl.exp(sink - top)
    divisor = tl.where(total > 0.0, total, 1.0)

    o_p = tl.load(
        o_parts + flat[:, :, None] * HEAD_DIM + dims[None, None, :],
        mask=ok[:, :, None] & (dims < HEAD_DIM)[None, None, :],
        other=0.0,
    )
    o = tl.sum(o_p * weights[:, :, None], axis=1) / divisor[:, None]

    b = rows // (heads * T)
    offsets = b * out_b + (rows // T % heads) * out_head + (rows % T) * out_t
    tl.store(
        out + offsets[:, None] + dims.to(tl.int64)[None, :] * out_d,
        o.to(out.dtype.element_ty),
        mask=(rows < N)[:, None] & (dims < HEAD_DIM)[None, :],
    )
