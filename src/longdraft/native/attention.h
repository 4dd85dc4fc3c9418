// The steps of flash attention on a CPU: scores of a block of keys, online softmax, accumulation of weighted values, and the merge of
// segments (flash-decoding's split KV). Rows are queries: those of all tokens and query heads of one KV head.
//
// A row's bits depend neither on other rows nor on the number of threads: block and segment boundaries are fixed, sums have a fixed
// order, and a block that is entirely masked for a row does not change that row.
// Template arguments: R rows, C vectors of columns (keys, or dimensions of values), E the KV cache's element type.
#pragma once

#include "amx_bf16.h"
#include "kv_cache.h"

namespace {

constexpr int64_t BLOCK = 128;    // keys that are processed at a time
constexpr int64_t SEGMENT = 512;  // keys of a thread's work item
constexpr int TILE_ROWS = 6;      // rows of a register tile of sums
constexpr int TILE_COLUMNS = MAX_SUMS / TILE_ROWS;  // vectors of columns of such a tile
constexpr float MASKED = -std::numeric_limits<float>::infinity();

// The rows of the next block's K^T or V that one group of rows prefetches while this block is computed. Each takes several steps, so that
// memory is loaded evenly.
struct PrefetchRange {
  Address start;
  int64_t row_bytes;      // bytes from row to row
  int64_t steps_per_row;  // steps of the computation before the next row is prefetched
};

struct Prefetcher {
  explicit Prefetcher(PrefetchRange range)
      : next(range.start), row_bytes(range.row_bytes), steps_per_row(range.steps_per_row), steps_left(range.steps_per_row) {}

  template <int BYTES> __attribute__((always_inline)) void prefetch_row() const {
    UNROLL for (int i = 0; i < BYTES; i += 64) prefetch(next + i);
  }

  inline void step() {
    next = --steps_left ? next : next + row_bytes;
    steps_left = steps_left ? steps_left : steps_per_row;
  }

  Address next;
  const int64_t row_bytes, steps_per_row;
  int64_t steps_left;
};

// Computes a tile of scores: s (R, BLOCK) = q (R, d) times C x LANES columns of kt (d, keys).
template <int R, int C, typename E>
inline void score_tile(const float *q, int64_t d, const E *kt, int64_t kt_stride, PrefetchRange prefetch_range, float *s) {
  vec acc[R * C] = {};
  Prefetcher prefetcher(prefetch_range);
  for (int64_t i = 0; i < d; i++, prefetcher.step()) {
    vec b[C];
    UNROLL for (int c = 0; c < C; c++) b[c] = load(kt + i * kt_stride + c * LANES);
    prefetcher.prefetch_row<C * LANES * sizeof(E)>();
    UNROLL for (int r = 0; r < R; r++) {
      UNROLL for (int c = 0; c < C; c++) acc[r * C + c] = fmadd(broadcast(q[r * d + i]), b[c], acc[r * C + c]);
    }
  }
  UNROLL for (int r = 0; r < R; r++) {
    UNROLL for (int c = 0; c < C; c++) store(s + r * BLOCK + c * LANES, acc[r * C + c]);
  }
}

// Adds a tile of weighted values: out (R, d) += p (R, BLOCK) times C x LANES columns of v (n_keys, d).
template <int R, int C, typename E>
inline void accumulate_pv_tile(const float *p, int64_t n_keys, const E *v, int64_t v_row_stride, PrefetchRange prefetch_range, float *out,
                               int64_t d) {
  vec acc[R * C];
  UNROLL for (int r = 0; r < R; r++) {
    UNROLL for (int c = 0; c < C; c++) acc[r * C + c] = load(out + r * d + c * LANES);
  }
  Prefetcher prefetcher(prefetch_range);
  for (int64_t j = 0; j < n_keys; j++, prefetcher.step()) {
    vec b[C];
    UNROLL for (int c = 0; c < C; c++) b[c] = load(v + j * v_row_stride + c * LANES);
    prefetcher.prefetch_row<C * LANES * sizeof(E)>();
    UNROLL for (int r = 0; r < R; r++) {
      UNROLL for (int c = 0; c < C; c++) acc[r * C + c] = fmadd(broadcast(p[r * BLOCK + j]), b[c], acc[r * C + c]);
    }
  }
  UNROLL for (int r = 0; r < R; r++) {
    UNROLL for (int c = 0; c < C; c++) store(out + r * d + c * LANES, acc[r * C + c]);
  }
}

template <typename E> inline PrefetchRange skip_columns(PrefetchRange range, int64_t columns) {
  range.start += columns * static_cast<int64_t>(sizeof(E));
  return range;
}

// Computes the scores of R rows for all keys of a block, tile by tile.
template <int R, typename E>
void score_rows(const float *q, int64_t d, const E *kt, int64_t kt_stride, int64_t n_keys, PrefetchRange prefetch_range, float *s) {
  int64_t j = 0;
  for (; j + TILE_COLUMNS * LANES <= n_keys; j += TILE_COLUMNS * LANES) {
    score_tile<R, TILE_COLUMNS>(q, d, kt + j, kt_stride, skip_columns<E>(prefetch_range, j), s + j);
  }
  for (; j + LANES <= n_keys; j += LANES) score_tile<R, 1>(q, d, kt + j, kt_stride, skip_columns<E>(prefetch_range, j), s + j);
  for (; j < n_keys; j++) {
    for (int r = 0; r < R; r++) {
      float score = 0;
      for (int64_t i = 0; i < d; i++) score = fmadd(q[r * d + i], load_scalar(kt + i * kt_stride + j), score);
      s[r * BLOCK + j] = score;
    }
  }
}

// Adds the weighted values of R rows in all dimensions, tile by tile.
template <int R, typename E>
void accumulate_pv_rows(const float *p, int64_t n_keys, const E *v, int64_t v_row_stride, PrefetchRange prefetch_range, float *out,
                        int64_t d) {
  int64_t c = 0;
  for (; c + TILE_COLUMNS * LANES <= d; c += TILE_COLUMNS * LANES) {
    accumulate_pv_tile<R, TILE_COLUMNS>(p, n_keys, v + c, v_row_stride, skip_columns<E>(prefetch_range, c), out + c, d);
  }
  for (; c < d; c += LANES) accumulate_pv_tile<R, 1>(p, n_keys, v + c, v_row_stride, skip_columns<E>(prefetch_range, c), out + c, d);
}

// Transposes a block of keys: kt (d, BLOCK) = k (n_keys, d)^T, where d is a multiple of LANES.
void transpose_block(const float *k, int64_t k_row_stride, int64_t n_keys, int64_t d, float *kt) {
  for (int64_t j = 0; j < n_keys; j += LANES) {
    for (int64_t i = 0; i < d; i += LANES) {
      vec a[LANES];
      for (int64_t r = 0; r < LANES; r++) {
        a[r] = load(k + std::min(j + r, n_keys - 1) * k_row_stride + i);
        prefetch(address_of(k + i) + 4 * (j + r + BLOCK) * k_row_stride);
      }
      transpose(a);
      for (int64_t r = 0; r < LANES; r++) store(kt + (i + r) * BLOCK + j, a[r]);
    }
  }
}

// Splits rows into groups of about one size, at most TILE_ROWS, and calls f(R, first row, prefetch_range_of) for each group.
// prefetch_range_of(start, row_bytes, n_matrix_rows) returns the part of a matrix (K^T or V) that this group prefetches.
template <typename Fn> inline void for_each_row_group(int64_t rows, const Fn &f) {
  const int64_t groups = (rows + TILE_ROWS - 1) / TILE_ROWS;
  for (int64_t g = 0, first = 0; g < groups; g++) {
    const int64_t end = rows * (g + 1) / groups;
    const auto prefetch_range_of = [=](Address start, int64_t row_bytes, int64_t n_matrix_rows) {
      return PrefetchRange{start + n_matrix_rows * g / groups * row_bytes, row_bytes, groups};
    };
    dispatch<TILE_ROWS>(end - first, [&](auto R) { f(R, first, prefetch_range_of); });
    first = end;
  }
}

int64_t round_up_rows(int64_t rows) { return (rows + LANES - 1) / LANES * LANES; }

// The result of attention to some of the keys, for the rows of one KV head. Rows are padded to a multiple of LANES.
struct PartialAttention {
  float *out;      // (rows, d): sum of exp(score - row_max) * value
  float *row_max;  // (rows,): largest score
  float *row_sum;  // (rows,): sum of exp(score - row_max), by which normalize() divides `out`
};

// Replaces a block's scores (rows, BLOCK) by p = exp(score - row_max), updates row_max and row_sum, and rescales the rows of part.out
// whose row_max has risen. Processes LANES rows at a time, so that row_max and row_sum are vectors.
void online_softmax_update(float *s, int64_t rows, int64_t n_keys, int64_t d, PartialAttention part) {
  int64_t end = n_keys;
  for (; end % 16; end++) {  // masks keys up to whole vectors of any instruction set
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
    const vec old_max = load(part.row_max + first);
    const vec row_max = v_max(reduce_lanes<Max, LANES>(vectors), old_max);
    const vec base = row_max == MASKED ? vec{} : row_max;  // 0 for rows whose keys are all masked so far: -inf - -inf would be NaN
    const vec rescale = v_exp(old_max - base);
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
          block_sum.parts[i] += p;
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

// The queries of a work item, and where its result is accumulated.
struct AttentionInput {
  const float *q;  // (rows, d), from scale_queries()
  int64_t rows, d;
  PartialAttention part;     // of the keys so far
  float softcap = 0;         // 0: no cap
  int64_t window_begin = 0;  // the first key that any row sees
  bool bf16 = false;         // true: q is in bfloat16, and products run on AMX
};

bool use_amx_bf16(const KVCache &kv) { return HAVE_AMX && kv.dtype == KVDtype::BFLOAT16; }

// Returns the number of floats that scale_queries() writes.
int64_t scaled_queries_size(int64_t rows, int64_t d, bool bf16) {
  if (HAVE_AMX && bf16) return bf16::round_up(rows, bf16::TILE_SIDE) * bf16::round_up(d, bf16::TILE_DEPTH) / 2;
  return Scratch::round_up_to_line(rows * d);
}

// Multiplies queries (rows, d) by the softmax scale. bf16: also rounds them to bfloat16 for AMX.
void scale_queries(const float *q, int64_t rows, int64_t d, float scale, bool bf16, float *to) {
  if (HAVE_AMX && bf16) return bf16::round_queries(q, rows, d, scale, reinterpret_cast<BFloat16 *>(to));
  for (int64_t i = 0; i < rows * d; i++) to[i] = q[i] * scale;
}

// Multiplies each key's column of s (rows, BLOCK), scores or weights, by the key's int8 scale.
void scale_keys(float *s, int64_t rows, int64_t n_keys, const float *scales) {
  for (int64_t r = 0; r < rows; r++, s += BLOCK) {
    int64_t j = 0;
    for (; j + LANES <= n_keys; j += LANES) store(s + j, load(s + j) * load(scales + j));
    for (; j < n_keys; j++) s[j] *= scales[j];
  }
}

// Caps scores (rows, BLOCK): s = softcap * tanh(s / softcap). Computes whole vectors only, so that a score's bits do not depend on its
// column.
void cap_scores(float *s, int64_t rows, int64_t n_keys, float softcap) {
  const float inverse = 1.0f / softcap;
  for (int64_t r = 0; r < rows; r++, s += BLOCK) {
    for (int64_t j = 0; j < n_keys; j += LANES) store(s + j, softcap * v_tanh(load(s + j) * inverse));
  }
}

// Computes the scores s (rows, BLOCK) of keys [first_key, first_key + n_keys). kt: memory for a block of transposed keys.
void score_block(const AttentionInput &in, const KVHead &kv, int64_t first_key, int64_t n_keys, float *s, float *kt) {
  const auto score_keys = [&](auto *kt, int64_t kt_stride, int64_t block_distance) {
    const int64_t element = sizeof *kt;
    const Address next = address_of(kt) + block_distance * element;
    for_each_row_group(in.rows, [&](auto R, int64_t r, auto prefetch_range_of) {
      score_rows<R.value>(in.q + r * in.d, in.d, kt, kt_stride, n_keys, prefetch_range_of(next, kt_stride * element, in.d),
                          s + r * BLOCK);
    });
  };
  if (in.bf16) {
    if (HAVE_AMX) {
      bf16::score(reinterpret_cast<const BFloat16 *>(in.q), in.rows, in.d, static_cast<BFloat16 *>(kv.k) + first_key, kv.k_dim_stride,
                  n_keys, s, BLOCK);
    }
  } else if (kv.dtype == KVDtype::FLOAT32 && kv.k_row_stride != 1) {
    transpose_block(static_cast<float *>(kv.k) + first_key * kv.k_row_stride, kv.k_row_stride, n_keys, in.d, kt);
    score_keys(kt, BLOCK, 0);
  } else if (kv.dtype == KVDtype::INT4) {
    dequantize_int4_keys<BLOCK>(static_cast<byte *>(kv.k) + first_key, kv.k_dim_stride, in.d, n_keys, kt);
    score_keys(kt, BLOCK, 0);
  } else {
    dispatch_dtype(kv.k, kv.dtype, [&](auto *k) { score_keys(k + first_key, kv.k_dim_stride, BLOCK); });
  }
  if (kv.k_scale) scale_keys(s, in.rows, n_keys, kv.k_scale + first_key);
  if (in.softcap) cap_scores(s, in.rows, n_keys, in.softcap);
}

// Adds the weighted values of keys [first_key + from, first_key + n_keys) to part.out. p (rows, BLOCK) has the weights of keys from
// first_key on, and is overwritten. block: memory for a block of values.
void accumulate_pv_block(const AttentionInput &in, const KVHead &kv, int64_t first_key, int64_t from, int64_t n_keys, float *p,
                         float *block) {
  if (HAVE_AMX && in.bf16) {
    const BFloat16 *v = static_cast<BFloat16 *>(kv.v) + first_key * kv.v_row_stride;
    return bf16::accumulate_pv(p, BLOCK, in.rows, v, kv.v_row_stride, from, n_keys, in.d, in.part.out);
  }
  first_key += from, n_keys -= from, p += from;
  const auto accumulate = [&](const auto *v, int64_t row_stride, int64_t block_distance) {
    for_each_row_group(in.rows, [&](auto R, int64_t r, auto prefetch_range_of) {
      const int64_t row_bytes = row_stride * static_cast<int64_t>(sizeof *v);
      const PrefetchRange prefetch_range = prefetch_range_of(address_of(v) + block_distance * row_bytes, row_bytes, n_keys);
      accumulate_pv_rows<R.value>(p + r * BLOCK, n_keys, v, row_stride, prefetch_range, in.part.out + r * in.d, in.d);
    });
  };
  void *v = kv_element(kv.v, kv.dtype, first_key * kv.v_row_stride);
  if (kv.dtype == KVDtype::INT4) {
    dequantize_int4_values(static_cast<byte *>(v), kv.v_row_stride, in.d, n_keys, block);
    return accumulate(block, in.d, 0);
  }
  if (kv.v_scale) scale_keys(p, in.rows, n_keys, kv.v_scale + first_key);
  dispatch_dtype(v, kv.dtype, [&](auto *values) { accumulate(values, kv.v_row_stride, BLOCK); });
}

// Masks the keys before each row's window. s (rows, BLOCK): scores of n_keys keys from rank first_key on. Row r belongs to token
// r % n_tokens. window_start (n_tokens,): the lowest rank that a token sees; null: no window. All tokens see the first n_first keys.
inline void mask_before_window(float *s, int64_t rows, int64_t first_key, int64_t n_keys, const std::int32_t *window_start,
                               int64_t n_tokens, int64_t n_first = 0) {
  if (!window_start) return;
  const int64_t begin = std::clamp<int64_t>(n_first - first_key, 0, n_keys);
  for (int64_t r = 0; r < rows; r++, s += BLOCK) {
    const int64_t end = std::min<int64_t>(n_keys, window_start[r % n_tokens] - first_key);
    if (end > begin) std::fill(s + begin, s + end, MASKED);
  }
}

// Attends to keys [first_key, first_key + n_keys). mask(s, first_key, n_keys) sets scores to MASKED. Keys before the windows of all rows
// are not read, because their weight is 0.
template <typename Mask>
inline void attend_block(const AttentionInput &in, const KVHead &kv, int64_t first_key, int64_t n_keys, float *s, float *kt,
                         const Mask &mask) {
  const int64_t n_unseen = std::max<int64_t>(0, in.window_begin - first_key), n_skipped = n_unseen / 16 * 16;  // whole vectors
  score_block(in, kv, first_key + n_skipped, n_keys - n_skipped, s + n_skipped, kt);
  mask(s, first_key, n_keys);
  online_softmax_update(s, in.rows, n_keys, in.d, in.part);
  accumulate_pv_block(in, kv, first_key, n_unseen, n_keys, s, kt);
}

// Returns the number of floats of a PartialAttention.
int64_t partial_size(int64_t rows, int64_t d) { return Scratch::round_up_to_line(round_up_rows(rows) * (d + 2)); }

// Returns the PartialAttention that was made at an address.
PartialAttention partial_at(float *memory, int64_t rows, int64_t d) {
  return {memory, memory + round_up_rows(rows) * d, memory + round_up_rows(rows) * (d + 1)};
}

// Makes a PartialAttention of no keys.
PartialAttention empty_partial(float *memory, int64_t rows, int64_t d) {
  const PartialAttention part = partial_at(memory, rows, d);
  std::fill(part.out, part.row_max, 0.0f);
  std::fill(part.row_max, part.row_sum, MASKED);
  std::fill(part.row_sum, part.row_sum + round_up_rows(rows), 0.0f);
  return part;
}

// Merges the next segment's result into `all`, the result of the segments before. A segment that is masked for a row leaves it unchanged.
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

// Divides by the softmax's denominator: out = part.out / row_sum. sinks: null, or the score of each head's sink, whose weight is added to
// row_sum; row r belongs to head r / n_tokens.
void normalize(const PartialAttention &part, int64_t rows, int64_t d, float *out, const float *sinks = nullptr, int64_t n_tokens = 1) {
  for (int64_t r = 0; r < rows; r++) {
    float rescale = 1.0f, row_sum = part.row_sum[r];
    if (sinks) {
      const float sink = sinks[r / n_tokens], row_max = std::max(part.row_max[r], sink);
      rescale = v_exp(broadcast(part.row_max[r] - row_max))[0];
      row_sum = fmadd(rescale, row_sum, v_exp(broadcast(sink - row_max))[0]);
    }
    for (int64_t c = 0; c < d; c++) out[r * d + c] = part.out[r * d + c] * rescale / row_sum;
  }
}

}  // namespace
