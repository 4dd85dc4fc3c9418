// Flash attention on a CPU, step by step: the scores of a block of keys, the online softmax, the weighted values, and the merge of
// segments (flash-decoding's split KV).
//
// A row's bits depend neither on other rows nor on the number of threads: block and segment boundaries are fixed, sums have a fixed
// order, and a block that is entirely masked for a row does not change that row.
#pragma once

#include "amx_bf16.h"
#include "kv_cache.h"
#include "vectors.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace {

using std::int64_t;

constexpr int64_t BLOCK = 128;    // keys that are processed at a time
constexpr int64_t SEGMENT = 512;  // keys of a thread's work item
constexpr int TILE_ROWS = 6;           // rows of a register tile
constexpr int TILE_COLUMNS = MAX_SUMS / TILE_ROWS;
constexpr float MASKED = -std::numeric_limits<float>::infinity();

// The matrix rows of the next block's K^T or V that one row group prefetches while this block is computed, in small steps, so that
// memory is loaded evenly.
struct PrefetchRange {
  Address next;              // start of the range
  int64_t row_bytes, steps;  // stride of rows; steps for each row
};

struct Prefetcher {
  explicit Prefetcher(PrefetchRange range) : next(range.next), row_bytes(range.row_bytes), steps(range.steps), left(range.steps) {}

  template <int BYTES>
  inline void prefetch_row() const {
    UNROLL for (int i = 0; i < BYTES; i += 64) prefetch(next + i);
  }

  inline void step() {
    next = --left ? next : next + row_bytes;
    left = left ? left : steps;
  }

  Address next;
  const int64_t row_bytes, steps;
  int64_t left;
};

// s (R, BLOCK) = q (R, d) times C x LANES columns of kt (d, keys).
template <int R, int C, typename E>
inline void score(const float *q, int64_t d, const E *kt, int64_t kt_row, PrefetchRange prefetch_range, float *s) {
  vec acc[R * C] = {};
  Prefetcher prefetcher(prefetch_range);
  for (int64_t i = 0; i < d; i++, prefetcher.step()) {
    vec b[C];
    UNROLL for (int c = 0; c < C; c++) b[c] = load(kt + i * kt_row + c * LANES);
    prefetcher.prefetch_row<C * LANES * sizeof(E)>();
    UNROLL for (int r = 0; r < R; r++) {
      UNROLL for (int c = 0; c < C; c++) acc[r * C + c] = fmadd(broadcast(q[r * d + i]), b[c], acc[r * C + c]);
    }
  }
  UNROLL for (int r = 0; r < R; r++) {
    UNROLL for (int c = 0; c < C; c++) store(s + r * BLOCK + c * LANES, acc[r * C + c]);
  }
}

// out (R, d) += p (R, BLOCK) times C x LANES columns of v (keys, d).
template <int R, int C, typename E>
inline void accumulate_pv(const float *p, int64_t keys, const E *v, int64_t v_row, PrefetchRange prefetch_range, float *out, int64_t d) {
  vec acc[R * C];
  UNROLL for (int r = 0; r < R; r++) {
    UNROLL for (int c = 0; c < C; c++) acc[r * C + c] = load(out + r * d + c * LANES);
  }
  Prefetcher prefetcher(prefetch_range);
  for (int64_t j = 0; j < keys; j++, prefetcher.step()) {
    vec b[C];
    UNROLL for (int c = 0; c < C; c++) b[c] = load(v + j * v_row + c * LANES);
    prefetcher.prefetch_row<C * LANES * sizeof(E)>();
    UNROLL for (int r = 0; r < R; r++) {
      UNROLL for (int c = 0; c < C; c++) acc[r * C + c] = fmadd(broadcast(p[r * BLOCK + j]), b[c], acc[r * C + c]);
    }
  }
  UNROLL for (int r = 0; r < R; r++) {
    UNROLL for (int c = 0; c < C; c++) store(out + r * d + c * LANES, acc[r * C + c]);
  }
}

template <typename E>
inline PrefetchRange advanced(PrefetchRange range, int64_t columns) {
  range.next += columns * static_cast<int64_t>(sizeof(E));
  return range;
}

template <int R, typename E>
void score_rows(const float *q, int64_t d, const E *kt, int64_t kt_row, int64_t keys, PrefetchRange prefetch_range, float *s) {
  int64_t j = 0;
  for (; j + TILE_COLUMNS * LANES <= keys; j += TILE_COLUMNS * LANES) {
    score<R, TILE_COLUMNS>(q, d, kt + j, kt_row, advanced<E>(prefetch_range, j), s + j);
  }
  for (; j + LANES <= keys; j += LANES) score<R, 1>(q, d, kt + j, kt_row, advanced<E>(prefetch_range, j), s + j);
  for (; j < keys; j++) {
    for (int r = 0; r < R; r++) {
      float score = 0;
      for (int64_t i = 0; i < d; i++) score = fmadd(q[r * d + i], load_scalar(kt + i * kt_row + j), score);
      s[r * BLOCK + j] = score;
    }
  }
}

template <int R, typename E>
void accumulate_pv_rows(const float *p, int64_t keys, const E *v, int64_t v_row, PrefetchRange prefetch_range, float *out, int64_t d) {
  int64_t c = 0;
  for (; c + TILE_COLUMNS * LANES <= d; c += TILE_COLUMNS * LANES) {
    accumulate_pv<R, TILE_COLUMNS>(p, keys, v + c, v_row, advanced<E>(prefetch_range, c), out + c, d);
  }
  for (; c < d; c += LANES) accumulate_pv<R, 1>(p, keys, v + c, v_row, advanced<E>(prefetch_range, c), out + c, d);
}

// kt (d, BLOCK) = k (keys, d) transposed; d is a multiple of LANES.
void transpose_block(const float *k, int64_t k_row, int64_t keys, int64_t d, float *kt) {
  for (int64_t j = 0; j < keys; j += LANES) {
    for (int64_t i = 0; i < d; i += LANES) {
      vec a[LANES];
      for (int64_t r = 0; r < LANES; r++) {
        a[r] = load(k + std::min(j + r, keys - 1) * k_row + i);
        prefetch(address_of(k + i) + 4 * (j + r + BLOCK) * k_row);
      }
      transpose(a);
      for (int64_t r = 0; r < LANES; r++) store(kt + (i + r) * BLOCK + j, a[r]);
    }
  }
}

// Splits rows into even groups of at most TILE_ROWS and calls f(R, first row, group_range).
// group_range(start, stride in bytes, n_matrix_rows) is the part of a matrix that the group prefetches.
template <typename Fn>
inline void for_each_row_group(int64_t rows, const Fn &f) {
  const int64_t groups = (rows + TILE_ROWS - 1) / TILE_ROWS;
  for (int64_t g = 0, first = 0; g < groups; g++) {
    const int64_t end = rows * (g + 1) / groups;
    const auto group_range = [=](Address start, int64_t row_bytes, int64_t n_matrix_rows) {
      return PrefetchRange{start + n_matrix_rows * g / groups * row_bytes, row_bytes, groups};
    };
    dispatch<TILE_ROWS>(end - first, [&](auto R) { f(R, first, group_range); });
    first = end;
  }
}

int64_t round_up_rows(int64_t rows) { return (rows + LANES - 1) / LANES * LANES; }

// Attention to some of the keys, for the rows of one KV head, padded to whole vectors of rows.
struct PartialAttention {
  float *out, *row_max, *row_sum;  // (rows, d), not divided by row_sum; (rows,): maximum score; sum of exp(score - row_max)
};

// Replaces a block's scores (rows, BLOCK) by exp(score - row_max), and rescales `part` where row_max has risen. LANES rows are
// processed at a time, so that row_max and row_sum are vectors.
void online_softmax_update(float *s, int64_t rows, int64_t keys, int64_t d, PartialAttention part) {
  int64_t end = keys;
  for (; end % 16; end++) {
    for (int64_t r = 0; r < rows; r++) s[r * BLOCK + end] = MASKED;
  }
  for (int64_t first = 0; first < rows; first += LANES) {
    const int64_t count = std::min<int64_t>(LANES, rows - first);
    float *scores = s + first * BLOCK;
    vec vectors[LANES];
    for (int64_t r = 0; r < LANES; r++) vectors[r] = broadcast(MASKED);
    for (int64_t r = 0; r < count; r++) {
      vec max0 = load(scores + r * BLOCK), max1 = max0;
      int64_t j = LANES;
      for (; j + LANES < end; j += 2 * LANES) {
        max0 = v_max(load(scores + r * BLOCK + j), max0);
        max1 = v_max(load(scores + r * BLOCK + j + LANES), max1);
      }
      if (j < end) max0 = v_max(load(scores + r * BLOCK + j), max0);
      vectors[r] = v_max(max0, max1);
    }
    const vec before = load(part.row_max + first);
    const vec row_max = v_max(reduce_lanes<Max, LANES>(vectors), before);
    const vec base = row_max == MASKED ? vec{} : row_max;  // for rows that are all masked so far
    const vec rescale = v_exp(before - base);
    float bases[LANES], rescales[LANES];
    store(bases, base);
    store(rescales, rescale);
    for (int64_t r = 0; r < LANES; r++) vectors[r] = vec{};
    for (int64_t r = 0; r < count; r++) {
      float *row = scores + r * BLOCK;
      Sum16 block_sum;
      for (int64_t j = 0; j < end; j += 16) {
        UNROLL for (int i = 0; i < Sum16::VECTORS; i++) {
          const vec p = v_exp(load(row + j + i * LANES) - bases[r]);
          store(row + j + i * LANES, p);
          block_sum.lanes[i] += p;
        }
      }
      vectors[r] = block_sum.fold_to_vector();
      if (rescales[r] != 1.0f) {
        float *out = part.out + (first + r) * d;
        for (int64_t c = 0; c < d; c += LANES) store(out + c, load(out + c) * rescales[r]);
      }
    }
    store(part.row_max + first, row_max);
    store(part.row_sum + first, fmadd(load(part.row_sum + first), rescale, horizontal_sums<LANES>(vectors)));
  }
}

// Queries (rows, d), multiplied by the softmax scale, and the result for the keys so far.
struct AttentionInput {
  const float *q;
  int64_t rows, d;
  PartialAttention part;
  float softcap = 0;            // 0: none
  int64_t window_begin = 0;  // the first key that any row sees
  bool bf16 = false;           // q was rounded by bf16::round_queries, and products run on AMX
};

bool use_amx_bf16(const KVCache &kv) { return HAVE_AMX && kv.dtype == KVDtype::BFLOAT16; }

// Number of floats that scale_queries() writes.
int64_t scaled_queries_size(int64_t rows, int64_t d, bool bf16) {
#if defined(LONGDRAFT_AMX)
  if (bf16) return bf16::round_up(rows, bf16::TILE_SIDE) * bf16::round_up(d, bf16::TILE_DEPTH) / 2;
#endif
  return Scratch::round_up_to_line(rows * d);
}

void scale_queries(const float *q, int64_t rows, int64_t d, float scale, bool bf16, float *to) {
#if defined(LONGDRAFT_AMX)
  if (bf16) return bf16::round_queries(q, rows, d, scale, reinterpret_cast<BFloat16 *>(to));
#endif
  for (int64_t i = 0; i < rows * d; i++) to[i] = q[i] * scale;
}

// s (rows, BLOCK): multiplies each key's column by its int8 scale.
void scale_keys(float *s, int64_t rows, int64_t keys, const float *scales) {
  for (int64_t r = 0; r < rows; r++, s += BLOCK) {
    int64_t j = 0;
    for (; j + LANES <= keys; j += LANES) store(s + j, load(s + j) * load(scales + j));
    for (; j < keys; j++) s[j] *= scales[j];
  }
}

// s = softcap * tanh(s / softcap) for (rows, BLOCK). Processes whole vectors only, so that a score's bits do not depend on its column.
void cap_scores(float *s, int64_t rows, int64_t keys, float softcap) {
  const float inverse = 1.0f / softcap;
  for (int64_t r = 0; r < rows; r++, s += BLOCK) {
    for (int64_t j = 0; j < keys; j += LANES) store(s + j, softcap * v_tanh(load(s + j) * inverse));
  }
}

// s (rows, BLOCK) = scores of keys [a, a + keys). kt: memory for transposed keys.
void score_block(const AttentionInput &in, const KVHead &kv, int64_t a, int64_t keys, float *s, float *kt) {
  const auto score_keys = [&](auto *kt, int64_t kt_row, int64_t block_distance) {
    const int64_t element = sizeof *kt;
    const Address next = address_of(kt) + block_distance * element;
    for_each_row_group(in.rows, [&](auto R, int64_t r, auto group_range) {
      score_rows<R.value>(in.q + r * in.d, in.d, kt, kt_row, keys, group_range(next, kt_row * element, in.d), s + r * BLOCK);
    });
  };
  if (in.bf16) {
#if defined(LONGDRAFT_AMX)
    bf16::score(reinterpret_cast<const BFloat16 *>(in.q), in.rows, in.d, static_cast<BFloat16 *>(kv.k) + a, kv.k_dim, keys, s, BLOCK);
#endif
  } else if (kv.dtype == KVDtype::FLOAT32 && kv.k_row != 1) {
    transpose_block(static_cast<float *>(kv.k) + a * kv.k_row, kv.k_row, keys, in.d, kt);
    score_keys(kt, BLOCK, 0);
  } else {
    dispatch_dtype(kv.k, kv.dtype, [&](auto *k) { score_keys(k + a, kv.k_dim, BLOCK); });
  }
  if (kv.k_scale) scale_keys(s, in.rows, keys, kv.k_scale + a);
  if (in.softcap) cap_scores(s, in.rows, keys, in.softcap);
}

// part.out += p (rows, BLOCK) times the values of keys [a + from, a + keys). Column 0 of p is key a. Overwrites p.
void accumulate_pv_block(const AttentionInput &in, const KVHead &kv, int64_t a, int64_t from, int64_t keys, float *p) {
#if defined(LONGDRAFT_AMX)
  if (in.bf16) {
    const BFloat16 *v = static_cast<BFloat16 *>(kv.v) + a * kv.v_row;
    return bf16::accumulate_pv(p, BLOCK, in.rows, v, kv.v_row, from, keys, in.d, in.part.out);
  }
#endif
  a += from, keys -= from, p += from;
  if (kv.v_scale) scale_keys(p, in.rows, keys, kv.v_scale + a);
  dispatch_dtype(kv.v, kv.dtype, [&](auto *values) {
    auto *v = values + a * kv.v_row;
    for_each_row_group(in.rows, [&](auto R, int64_t r, auto group_range) {
      const int64_t row_bytes = kv.v_row * static_cast<int64_t>(sizeof *v);
      const PrefetchRange prefetch_range = group_range(address_of(v) + BLOCK * row_bytes, row_bytes, keys);
      accumulate_pv_rows<R.value>(p + r * BLOCK, keys, v, kv.v_row, prefetch_range, in.part.out + r * in.d, in.d);
    });
  });
}

// Masks, for each row r, the scores (rows, BLOCK) of keys in [a, a + keys) that lie before window_start[r % period].
inline void mask_before_window(float *s, int64_t rows, int64_t a, int64_t keys, const std::int32_t *window_start, int64_t period) {
  if (!window_start) return;
  for (int64_t r = 0; r < rows; r++, s += BLOCK) {
    const int64_t n_masked = window_start[r % period] - a;
    if (n_masked > 0) std::fill_n(s, std::min(keys, n_masked), MASKED);
  }
}

// Attends to keys [a, a + keys). mask(s, a, keys) sets scores to MASKED. Keys before the windows of all rows are not read,
// because their weight is 0.
template <typename Mask>
inline void attend_block(const AttentionInput &in, const KVHead &kv, int64_t a, int64_t keys, float *s, float *kt,
                         const Mask &mask) {
  const int64_t n_unseen = std::max<int64_t>(0, in.window_begin - a), n_skipped = n_unseen / 16 * 16;  // rounded down to whole vectors
  score_block(in, kv, a + n_skipped, keys - n_skipped, s + n_skipped, kt);
  mask(s, a, keys);
  online_softmax_update(s, in.rows, keys, in.d, in.part);
  accumulate_pv_block(in, kv, a, n_unseen, keys, s);
}

// Number of floats of a PartialAttention; a PartialAttention at an address; a new one for no keys.
int64_t partial_size(int64_t rows, int64_t d) { return Scratch::round_up_to_line(round_up_rows(rows) * (d + 2)); }

PartialAttention partial_at(float *memory, int64_t rows, int64_t d) {
  return {memory, memory + round_up_rows(rows) * d, memory + round_up_rows(rows) * (d + 1)};
}

PartialAttention empty_partial(float *memory, int64_t rows, int64_t d) {
  const PartialAttention part = partial_at(memory, rows, d);
  std::fill(part.out, part.row_max, 0.0f);
  std::fill(part.row_max, part.row_sum, MASKED);
  std::fill(part.row_sum, part.row_sum + round_up_rows(rows), 0.0f);
  return part;
}

// Merges the next segment's result into `all`, that of the segments before. A segment that is masked for a row does not change the row.
void merge_partials(const PartialAttention &all, const PartialAttention &next, int64_t rows, int64_t d) {
  for (int64_t r = 0; r < rows; r++) {
    const float row_max = std::max(all.row_max[r], next.row_max[r]);
    if (row_max == MASKED) continue;
    // Not std::exp, whose bits differ between systems.
    const float scale_all = v_exp(broadcast(all.row_max[r] - row_max))[0], scale_next = v_exp(broadcast(next.row_max[r] - row_max))[0];
    float *out = all.out + r * d;
    const float *other = next.out + r * d;
    for (int64_t c = 0; c < d; c += LANES) store(out + c, fmadd(broadcast(scale_next), load(other + c), load(out + c) * scale_all));
    all.row_sum[r] = fmadd(scale_next, next.row_sum[r], all.row_sum[r] * scale_all);
    all.row_max[r] = row_max;
  }
}

// out = part.out / row_sum, where the sink of row r, sinks[r / period], is added to row_sum unless sinks is null.
void normalize(const PartialAttention &part, int64_t rows, int64_t d, float *out, const float *sinks = nullptr, int64_t period = 1) {
  for (int64_t r = 0; r < rows; r++) {
    float rescale = 1.0f, row_sum = part.row_sum[r];
    if (sinks) {
      const float sink = sinks[r / period], row_max = std::max(part.row_max[r], sink);
      rescale = v_exp(broadcast(part.row_max[r] - row_max))[0];
      row_sum = fmadd(rescale, row_sum, v_exp(broadcast(sink - row_max))[0]);
    }
    for (int64_t c = 0; c < d; c++) out[r * d + c] = part.out[r * d + c] * rescale / row_sum;
  }
}

}  // namespace
