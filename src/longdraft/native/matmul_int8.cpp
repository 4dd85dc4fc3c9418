// Computes y = x w^T + bias in int8 arithmetic: quantized weights times int8 activations, like ggml's vec_dot_q4_K_q8_K.
//
// LANES outputs are computed at once (quants.h), in one of four ways:
//   few rows:  codes are unpacked in registers, once for a group of rows. A sub-block takes eight dot products of 4 bytes in each lane, and
//              one multiplication by its scale.
//   by blocks: on AVX2 without VNNI, for six to 32 rows (K-quants; others to 8), codes of a block are unpacked to the L1 cache.
//   many rows: all codes of up to some hundred outputs are first unpacked to memory.
//   AMX:       the weights of a few sub-blocks are unpacked to memory at a time.
// A row's bits do not depend on the way, because operations that round have one order.
#include "outputs.h"
#include "matmul.h"
#include "threads.h"
#include "isa/amx.h"

namespace {

// AVX2's 16 registers are too few for codes and the sums of 8 rows. From BUFFERED_ROWS rows on, codes are unpacked to the L1 cache. With
// VNNI, this was not measured.
constexpr bool FEW_REGISTERS = LANES == 8 && DOT4_MAX_CODE < 255;
constexpr int BUFFERED_ROWS = 6;
constexpr int64_t MANY_ROWS = 32;  // above this many rows, all codes of some outputs are unpacked to memory first
constexpr int64_t UNPACKED_BYTES = 384 << 10;  // memory for unpacked codes
constexpr int64_t AMX_MIN_ROWS = 9;            // AMX is faster from this many rows on

// True if dot4_accumulate() subtracts 128 from codes. initial_sum() adds what the subtraction takes away.
template <typename F> constexpr bool FLIP_SIGN = F::MAX_CODE > DOT4_MAX_CODE;

// Returns the value from which a sum of code * q must start to become the sum of (code - ZERO_POINT) * q. neg_sum: -sum(q).
template <typename F> ALWAYS_INLINE inline ivec initial_sum(std::int32_t neg_sum) {
  constexpr int OFFSET = F::ZERO_POINT - (FLIP_SIGN<F> ? 128 : 0);
  if constexpr (OFFSET == 0) return ivec{};
  if constexpr (OFFSET > 0 && (OFFSET & (OFFSET - 1)) == 0)
    return broadcast(neg_sum) << __builtin_ctz(OFFSET);  // a shift is faster than a multiplication
  return broadcast(neg_sum) * OFFSET;
}

// True if dot_scaled_columns() multiplies products with the int_scale of SubBlockScale.
template <typename F> constexpr bool SCALED_COLUMNS = HAVE_SCALED_COLUMNS && F::SHARES_ACT_SCALE && F::MAX_CODE <= DOT4_MAX_CODE;

// The type of the factors of a sub-block's dot products. In K-quants the factor is SubBlockScale's int_scale, as int32, twice as int16
// (SCALED_COLUMNS), or as float where sums stay exact; in other formats it is the scale.
template <typename F> using SumScale = std::conditional_t<F::INT32_SUMS || SCALED_COLUMNS<F>, ivec, vec>;

// The number of these factors. With SCALED_COLUMNS, the last one is both scales times the zero point.
template <typename F> constexpr int SUM_SCALES = F::SCALES_PER_SUB_BLOCK + (SCALED_COLUMNS<F> && F::ZERO_POINT > 0);

template <typename F, typename S> ALWAYS_INLINE inline void convert_scales(const S *scale, SumScale<F> *to) {
  UNROLL for (int s = 0; s < F::SCALES_PER_SUB_BLOCK; s++) {
    if constexpr (SCALED_COLUMNS<F>) {
      to[s] = pack_halves(scale[s].int_scale, scale[s].int_scale);
    } else if constexpr (F::INT32_SUMS) {
      to[s] = scale[s].int_scale;
    } else if constexpr (F::SHARES_ACT_SCALE) {
      to[s] = to_float(scale[s].int_scale);
    } else {
      to[s] = scale[s];
    }
  }
  if constexpr (SUM_SCALES<F> == 3) to[2] = pack_halves(scale[0].int_scale * F::ZERO_POINT, scale[1].int_scale * F::ZERO_POINT);
}

ALWAYS_INLINE inline vec block_scale(const SubBlockScale &scale) { return scale.d; }
ALWAYS_INLINE inline vec block_scale(vec scale) { return scale; }  // unused: these formats have no d

ALWAYS_INLINE inline vec accumulate_scaled(ivec products, vec scale, vec sum) { return fmadd(to_float(products), scale, sum); }
ALWAYS_INLINE inline ivec accumulate_scaled(ivec products, ivec scale, ivec sum) { return products * scale + sum; }

// Multiplies R rows of x with a sub-block w of LANES outputs, and adds the products to y (R).
//   qs, blocks  activations of this sub-block (Int8Activations): a block for each row
//   sums (R)    sums over the sub-blocks that share an activation scale. They are exact: as floats they stay below 2^24.
//   last        true for the last of these sub-blocks: sums are scaled by d, added to y, and set to 0
template <typename F, int R, typename W>
ALWAYS_INLINE inline void mul_accumulate(const W &w, const SumScale<F> *sum_scales, vec d, const vec *min, bool last,
                                         const std::int8_t *qs, const Int8Activations::Block *blocks, SumScale<F> *sums, vec *y) {
  constexpr int COLUMNS_PER_SCALE = COLUMNS_PER_SUB_BLOCK / F::SCALES_PER_SUB_BLOCK;
  UNROLL for (int s = 0; s < F::SCALES_PER_SUB_BLOCK; s++) {
    if constexpr (SCALED_COLUMNS<F>) {
      dot_scaled_columns<F::MAX_CODE, R, COLUMNS_PER_SCALE>(w, s * COLUMNS_PER_SCALE, qs, sum_scales[s], sums);
      if constexpr (F::HAS_MIN) UNROLL for (int r = 0; r < R; r++) y[r] = fmadd(broadcast(blocks[r].scaled_sum), min[0], y[r]);
      if constexpr (F::ZERO_POINT > 0) {
        static_assert(F::SCALES_PER_SUB_BLOCK == 2 && F::ZERO_POINT * F::ROW.int_scale < 1 << 15);
        if (s == 1) UNROLL for (int r = 0; r < R; r++) sums[r] = dot_halves(sums[r], sum_scales[2], blocks[r].packed_neg_half_sums);
      }
      continue;
    }
    ivec products[R];
    UNROLL for (int r = 0; r < R; r++) {
      products[r] = initial_sum<F>(F::SCALES_PER_SUB_BLOCK == 1 ? blocks[r].neg_sum : blocks[r].neg_half_sums[s]);
    }
    if constexpr (HAVE_DOT_COLUMNS) {
      dot_columns<F::MAX_CODE, R, COLUMNS_PER_SCALE>(w, s * COLUMNS_PER_SCALE, qs, products);
    } else {
      UNROLL for (int i = s * COLUMNS_PER_SCALE; i < (s + 1) * COLUMNS_PER_SCALE; i++) {
        const ivec codes = w(i);
        UNROLL for (int r = 0; r < R; r++) products[r] = dot4_accumulate<F::MAX_CODE>(products[r], codes, qs + r * SUB_BLOCK + 4 * i);
      }
    }
    UNROLL for (int r = 0; r < R; r++) {
      if constexpr (F::HAS_MIN) {
        y[r] = fmadd(broadcast(F::SCALES_PER_SUB_BLOCK == 1 ? blocks[r].scaled_sum : blocks[r].scaled_half_sums[s]), min[s], y[r]);
      }
      if constexpr (F::SUB_BLOCKS_PER_ACT_SCALE == 1) {
        y[r] = fmadd(broadcast(blocks[r].scale), to_float(products[r]) * sum_scales[s], y[r]);
      } else {
        sums[r] = accumulate_scaled(products[r], sum_scales[s], sums[r]);
      }
    }
  }
  if (F::SUB_BLOCKS_PER_ACT_SCALE == 1 || !last) return;
  UNROLL for (int r = 0; r < R; r++) {
    y[r] = fmadd(broadcast(blocks[r].scale), __builtin_convertvector(sums[r], vec) * d, y[r]);
    sums[r] = SumScale<F>{};
  }
}

// Calls f with group_rows as a compile-time constant: 1 to 8, but not 5 or 7, which Int8Activations pads.
template <int R = Int8Activations::ROW_GROUP, typename Fn> inline void dispatch_rows(int64_t group_rows, const Fn &f) {
  if constexpr (R == 5 || R == 7) return dispatch_rows<R - 1>(group_rows, f);
  if (group_rows == R) return f(std::integral_constant<int, R>{});
  if constexpr (R > 1) return dispatch_rows<R - 1>(group_rows, f);
  __builtin_trap();
}

// True for the last of the sub-blocks that share an activation scale.
template <typename F> ALWAYS_INLINE inline bool completes_scale(int sub_block) {
  return sub_block % F::SUB_BLOCKS_PER_ACT_SCALE == F::SUB_BLOCKS_PER_ACT_SCALE - 1;
}

// A sub-block of LANES outputs, unpacked: the arguments of mul_accumulate().
template <typename F>
struct UnpackedSubBlock {
  ivec w[COLUMNS_PER_SUB_BLOCK];
  SumScale<F> sum_scales[SUM_SCALES<F>];
  vec d[F::SUB_BLOCKS_PER_ACT_SCALE > 1], min[F::HAS_MIN ? F::SCALES_PER_SUB_BLOCK : 0];
};

// Unpacks LANES outputs, sub-block by sub-block in the order of F::emit_order.
template <typename F> ALWAYS_INLINE inline void unpack_outputs(InterleavedRows in, int64_t n_in, UnpackedSubBlock<F> *to) {
  for (int64_t i = 0; i < n_in; i += F::WEIGHTS, in = in.advance(F::BYTES)) {
    F::unpack_block(in, [&](int, const auto &w, const auto *scale, const vec *min) ALWAYS_INLINE {
      UNROLL for (int i = 0; i < COLUMNS_PER_SUB_BLOCK; i++) to->w[i] = apply_codebook<F>(w(i));
      convert_scales<F>(scale, to->sum_scales);
      UNROLL for (int s = 0; F::HAS_MIN && s < F::SCALES_PER_SUB_BLOCK; s++) to->min[s] = min[s];
      if constexpr (F::SUB_BLOCKS_PER_ACT_SCALE > 1) to->d[0] = scale[0].d;
      to++;
    });
  }
}

// Multiplies R rows with the sub-blocks of a block of LANES outputs, as mul_accumulate().
template <typename F, int R>
ALWAYS_INLINE inline void multiply_block(const UnpackedSubBlock<F> *w, const std::int8_t *qs, const Int8Activations::Block *blocks,
                                         SumScale<F> *sums, vec *y) {
  for (int k = 0; k < F::WEIGHTS / SUB_BLOCK; k++, w++) {
    const int sub_block = F::emit_order(k);
    mul_accumulate<F, R>([&](int i) { return w->w[i]; }, w->sum_scales, F::SUB_BLOCKS_PER_ACT_SCALE > 1 ? w->d[0] : vec{}, w->min,
                         completes_scale<F>(sub_block), qs + sub_block * R * SUB_BLOCK, blocks + sub_block * R, sums, y);
  }
}

// Multiplies a group of R rows, from `row` on, with LANES outputs' blocks w of the inputs [first, first + inputs): adds to y (R).
template <typename F, int R>
void multiply(const UnpackedSubBlock<F> *w, const Int8Activations &x, int64_t row, int64_t first, int64_t inputs, vec *y) {
  constexpr int N_SUB_BLOCKS = F::WEIGHTS / SUB_BLOCK;
  vec totals[R];
  SumScale<F> sums[R] = {};
  UNROLL for (int r = 0; r < R; r++) totals[r] = y[r];
  const int64_t block_index = x.block_index(row, first / SUB_BLOCK);
  const std::int8_t *qs = x.qs + block_index * SUB_BLOCK;
  const Int8Activations::Block *blocks = x.blocks + block_index;
  for (int64_t i = 0; i < inputs; i += F::WEIGHTS, w += N_SUB_BLOCKS, qs += F::WEIGHTS * R, blocks += N_SUB_BLOCKS * R) {
    multiply_block<F, R>(w, qs, blocks, sums, totals);
  }
  UNROLL for (int r = 0; r < R; r++) y[r] = totals[r];
}

// Prefetches the weights of the next outputs, while those at `outputs` are multiplied with a number of rows. Each FAR_INTERVAL bytes, a
// second cache line is prefetched, FAR_DISTANCE bytes behind the first, which starts the hardware prefetcher earlier. For more than 2 rows,
// fewer such lines, in the next page, were faster on an Intel Xeon.
template <typename F, int ROWS>
struct WeightPrefetch {
  static constexpr int64_t FAR_DISTANCE = ROWS <= 2 ? 2048 : 4096, FAR_INTERVAL = ROWS <= 2 ? 64 : 512;
  Address next, end = next;

  WeightPrefetch(const OutputVector &outputs, const Matrix &m) : next(address_of(outputs.weights(m)) + LANES * m.w_stride) {}

  // Prefetches as many bytes as `weights` weights of LANES outputs have. A few cache lines at a time: many would delay other loads.
  ALWAYS_INLINE void advance(int64_t weights) {
    for (end += F::BYTES * LANES * weights / F::WEIGHTS; next < end; next += 64) {
      prefetch<2>(next);
      if (next % FAR_INTERVAL < 64) prefetch<2>(next + FAR_DISTANCE);
    }
  }
};

// Multiplies a group of R rows, from `row` on, with LANES outputs, and unpacks codes in registers, or from BUFFERED_ROWS rows on a block at
// a time. prefetch_next: true: also prefetches the weights of the next outputs.
template <typename F, int R>
void matmul_few_rows(const Int8Activations &x, int64_t row, const Matrix &m, const OutputVector &outputs, InterleavedRows in,
                     bool prefetch_next) {
  vec y[R] = {};
  SumScale<F> sums[R] = {};
  const int64_t block_index = x.block_index(row, 0);
  const std::int8_t *qs = x.qs + block_index * SUB_BLOCK;
  const Int8Activations::Block *blocks = x.blocks + block_index;
  WeightPrefetch<F, R> prefetch(outputs, m);
  for (int64_t i = 0; i < x.n_in; i += F::WEIGHTS, in = in.advance(F::BYTES)) {
    if constexpr (FEW_REGISTERS && R >= BUFFERED_ROWS) {
      UnpackedSubBlock<F> unpacked[F::WEIGHTS / SUB_BLOCK];
      if (prefetch_next) prefetch.advance(F::WEIGHTS);
      unpack_outputs<F>(in, F::WEIGHTS, unpacked);
      multiply_block<F, R>(unpacked, qs, blocks, sums, y);
    } else {
      F::unpack_block(in, [&](int sub_block, const auto &w, const auto *scale, const vec *min) ALWAYS_INLINE {
        if (prefetch_next) prefetch.advance(SUB_BLOCK);
        SumScale<F> factors[SUM_SCALES<F>];
        convert_scales<F>(scale, factors);
        mul_accumulate<F, R>([&](int i) { return apply_codebook<F>(w(i)); }, factors, block_scale(*scale), min,
                             completes_scale<F>(sub_block), qs + sub_block * R * SUB_BLOCK, blocks + sub_block * R, sums, y);
      });
    }
    qs += F::WEIGHTS * R;
    blocks += F::WEIGHTS / SUB_BLOCK * R;
  }
  const int64_t count = std::min(Int8Activations::ROW_GROUP, x.rows - row);
  for (int64_t r = 0; r < count; r++) outputs.write(m, row + r, y[r]);
}

// Multiplies up to MANY_ROWS rows with LANES outputs. Codes are unpacked to the L1 cache, those of a block at a time.
template <typename F> void matmul_by_blocks(const Int8Activations &x, const Matrix &m, const OutputVector &outputs, InterleavedRows in) {
  UnpackedSubBlock<F> unpacked[F::WEIGHTS / SUB_BLOCK];
  vec y[MANY_ROWS] = {};
  WeightPrefetch<F, MANY_ROWS> prefetch(outputs, m);
  for (int64_t i = 0; i < x.n_in; i += F::WEIGHTS, in = in.advance(F::BYTES)) {
    prefetch.advance(F::WEIGHTS);
    unpack_outputs<F>(in, F::WEIGHTS, unpacked);
    for (int64_t row = 0; row < x.rows; row += Int8Activations::ROW_GROUP) {
      dispatch_rows(x.group_rows(row), [&](auto rows) { multiply<F, rows.value>(unpacked, x, row, i, F::WEIGHTS, y + row); });
    }
  }
  for (int64_t r = 0; r < x.rows; r++) outputs.write(m, r, y[r]);
}

// Computes outputs for many rows: unpacks all codes of some outputs, then multiplies all rows with them.
template <typename F> void matmul_many_rows(const Int8Activations &x, const Matrix &m, int64_t from, int64_t to) {
  static thread_local Scratch scratch, interleave_scratch;
  const int64_t per_vector = x.n_in / SUB_BLOCK, floats_per_vector = per_vector * sizeof(UnpackedSubBlock<F>) / 4;
  const int64_t max_vectors = std::max<int64_t>(1, UNPACKED_BYTES / (4 * floats_per_vector));
  auto *sub_blocks =
      reinterpret_cast<UnpackedSubBlock<F> *>(scratch.get(std::min(max_vectors, (to - from + LANES - 1) / LANES) * floats_per_vector));
  for (int64_t first = from; first < to; first += max_vectors * LANES) {
    const int64_t end = std::min(to, first + max_vectors * LANES);
    for (int64_t out = first, i = 0; out < end; out += LANES, i++) {
      unpack_outputs<F>(OutputVector(m, out).interleaved_weights<F>(m, 0, x.n_in, interleave_scratch), x.n_in, sub_blocks + i * per_vector);
    }
    for (int64_t row = 0; row < x.rows; row += Int8Activations::ROW_GROUP) {
      const int64_t rows = std::min(Int8Activations::ROW_GROUP, x.rows - row);
      dispatch_rows(x.group_rows(row), [&](auto group_rows) {
        for (int64_t out = first, i = 0; out < end; out += LANES, i++) {
          vec y[group_rows.value] = {};
          multiply<F, group_rows.value>(sub_blocks + i * per_vector, x, row, 0, x.n_in, y);
          const OutputVector outputs(m, out);
          for (int64_t r = 0; r < rows; r++) outputs.write(m, row + r, y[r]);
        }
      });
    }
  }
}

constexpr int64_t AMX_WEIGHTS_AT_A_TIME = 4;  // AmxWeights that are unpacked at a time: 18 KB, which stay in the L1 cache for all rows
constexpr int64_t AMX_ROW_BLOCK = 512;        // rows that are computed at a time: activations and sums stay in the L2 cache

// The weights of LANES outputs in the 4 sub-blocks that share an activation scale: integers (code - ZERO_POINT) * int_scale, split into two
// bytes (isa/amx.h), with 4 weights of an output in a lane. Two sub-blocks (64 inputs) fill a tile.
template <typename F>
struct AmxWeights {
  typedef amx::SplitWeights<F::ZERO_POINT> SplitWeights;

  ivec low[2][2 * COLUMNS_PER_SUB_BLOCK], high[2][2 * COLUMNS_PER_SUB_BLOCK];
  vec d, min[F::HAS_MIN ? F::SUB_BLOCKS_PER_ACT_SCALE : 0];
};

// Unpacks LANES outputs. next: address of the next outputs' weights, which are prefetched.
template <typename F> void unpack_amx(InterleavedRows in, int64_t n_in, Address next, AmxWeights<F> *to) {
  constexpr int64_t SUB_BLOCK_BYTES = F::BYTES * LANES * SUB_BLOCK / F::WEIGHTS;
  Address prefetch_end = next;
  for (int64_t i = 0; i < n_in; i += F::WEIGHTS, in = in.advance(F::BYTES), to += F::WEIGHTS / SUB_BLOCK / F::SUB_BLOCKS_PER_ACT_SCALE) {
    F::unpack_block(in, [&](int sub_block, const auto &w, const auto *scale, const vec *min) ALWAYS_INLINE {
      for (prefetch_end += SUB_BLOCK_BYTES; next < prefetch_end; next += 64) prefetch<2>(next);
      AmxWeights<F> &dst = to[sub_block / F::SUB_BLOCKS_PER_ACT_SCALE];
      const int index = sub_block % F::SUB_BLOCKS_PER_ACT_SCALE, column = index % 2 * COLUMNS_PER_SUB_BLOCK;
      UNROLL for (int s = 0; s < F::SCALES_PER_SUB_BLOCK; s++) {
        constexpr int COLUMNS_PER_SCALE = COLUMNS_PER_SUB_BLOCK / F::SCALES_PER_SUB_BLOCK;
        const typename AmxWeights<F>::SplitWeights split(scale[s].int_scale);
        UNROLL for (int i = s * COLUMNS_PER_SCALE; i < (s + 1) * COLUMNS_PER_SCALE; i++) {
          split.split(apply_codebook<F>(w(i)), dst.low[index / 2][column + i], dst.high[index / 2][column + i]);
        }
        if constexpr (F::HAS_MIN) dst.min[index] = min[s];
      }
      dst.d = scale[0].d;
    });
  }
}

// Scales the sums of products with one AmxWeights, low and high (TILE_ROWS, LANES), and adds them to y (TILE_ROWS).
template <int TILE_ROWS, typename F>
ALWAYS_INLINE inline void add_sums(const AmxWeights<F> &w, const std::int32_t *low, const std::int32_t *high,
                                   const Int8Activations::Block128 *x, vec *y) {
  UNROLL for (int r = 0; r < TILE_ROWS; r++) {
    if constexpr (F::HAS_MIN) {
      UNROLL for (int p = 0; p < F::SUB_BLOCKS_PER_ACT_SCALE; p++) y[r] = fmadd(broadcast(x[r].scaled_sums[p]), w.min[p], y[r]);
    }
    const ivec sum = amx::load(low + r * LANES) + (amx::load(high + r * LANES) << AmxWeights<F>::SplitWeights::SHIFT);
    y[r] = fmadd(broadcast(x[r].scale), to_float(sum) * w.d, y[r]);
  }
}

// Multiplies rows [row, end) of x with `count` AmxWeights (an even number), and adds the products to y (rows, LANES). first: number of w[0]
// in its outputs. Software pipelining: the sums of one AmxWeights are stored and scaled while tiles of the next one are multiplied.
template <int TILE_ROWS, typename F>
void multiply_tiles(const AmxWeights<F> *w, int64_t first, int64_t count, const Int8Activations &x, int64_t row, int64_t end, float *y) {
  constexpr int64_t SCALE_INPUTS = F::SUB_BLOCKS_PER_ACT_SCALE * SUB_BLOCK;
  constexpr bool UNSIGNED = AmxWeights<F>::SplitWeights::UNSIGNED;
  alignas(64) std::int32_t low[TILE_ROWS * LANES], high[TILE_ROWS * LANES];
  vec acc[TILE_ROWS];
  const std::int8_t *qs = x.qs + row * x.n_in + first * SCALE_INPUTS * TILE_ROWS;
  const Int8Activations::Block128 *blocks128 = x.blocks128 + row * (x.n_in / SCALE_INPUTS) + first * TILE_ROWS, *previous = nullptr;
  for (;; row += TILE_ROWS, y += TILE_ROWS * LANES, qs += TILE_ROWS * x.n_in, blocks128 += TILE_ROWS * (x.n_in / SCALE_INPUTS)) {
    for (int64_t k = 0; k < count; k += 2) {
      if (row < end) amx::multiply<0, TILE_ROWS, UNSIGNED>(qs + k * SCALE_INPUTS * TILE_ROWS, w[k].low[0], w[k].high[0]);
      if (previous) {
        amx::store<2>(low), amx::store<3>(high);
        add_sums<TILE_ROWS>(w[(k ? k : count) - 1], low, high, previous, acc);
      }
      if (k == 0) {
        if (previous) UNROLL for (int r = 0; r < TILE_ROWS; r++) store(y + (r - TILE_ROWS) * LANES, acc[r]);
        if (row >= end) return;
        UNROLL for (int r = 0; r < TILE_ROWS; r++) acc[r] = ::load(y + r * LANES);
      }
      amx::multiply<2, TILE_ROWS, UNSIGNED>(qs + (k + 1) * SCALE_INPUTS * TILE_ROWS, w[k + 1].low[0], w[k + 1].high[0]);
      amx::store<0>(low), amx::store<1>(high);
      add_sums<TILE_ROWS>(w[k], low, high, blocks128 + k * TILE_ROWS, acc);
      previous = blocks128 + (k + 1) * TILE_ROWS;
    }
  }
}

// Computes outputs [from, to) on AMX: unpacks a few AmxWeights of LANES outputs at a time, and multiplies many rows with them.
template <int TILE_ROWS, typename F> void matmul_amx(const Int8Activations &x, const Matrix &m, int64_t from, int64_t to) {
  constexpr int64_t SCALE_INPUTS = F::SUB_BLOCKS_PER_ACT_SCALE * SUB_BLOCK;
  static thread_local Scratch sums_scratch, interleave_scratch;
  alignas(64) AmxWeights<F> w[AMX_WEIGHTS_AT_A_TIME];
  const amx::TileConfig config(TILE_ROWS);
  const int64_t n_weights = x.n_in / SCALE_INPUTS, vectors = (to - from + LANES - 1) / LANES;
  for (int64_t row = 0; row < x.rows; row += AMX_ROW_BLOCK) {
    const int64_t end = std::min(x.rows, row + AMX_ROW_BLOCK), sums_size = (end - row + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS * LANES;
    float *sums = sums_scratch.get(vectors * sums_size);
    std::memset(sums, 0, vectors * sums_size * sizeof(float));
    for (int64_t first = 0; first < n_weights; first += AMX_WEIGHTS_AT_A_TIME) {
      const int64_t count = std::min(AMX_WEIGHTS_AT_A_TIME, n_weights - first);
      for (int64_t v = 0; v < vectors; v++) {
        const OutputVector outputs(m, from + v * LANES);
        const Address next = address_of(outputs.weights(m)) + LANES * (m.w_stride + first * SCALE_INPUTS / F::WEIGHTS * F::BYTES);
        unpack_amx<F>(outputs.interleaved_weights<F>(m, first * SCALE_INPUTS, count * SCALE_INPUTS, interleave_scratch),
                      count * SCALE_INPUTS, next, w);
        multiply_tiles<TILE_ROWS>(w, first, count, x, row, end, sums + v * sums_size);
      }
    }
    for (int64_t r = row; r < end; r++, sums += LANES) {
      for (int64_t v = 0; v < vectors; v++) OutputVector(m, from + v * LANES).write(m, r, load(sums + v * sums_size));
    }
  }
}

template <typename F> void matmul_outputs(const Int8Activations &x, const Matrix &m, int64_t from, int64_t to) {
  if constexpr (HAVE_AMX && F::SUB_BLOCKS_PER_ACT_SCALE > 1) {
    if (x.tile_rows == 8) return matmul_amx<8, F>(x, m, from, to);
    if (x.tile_rows == 12) return matmul_amx<12, F>(x, m, from, to);
    if (x.tile_rows == 16) return matmul_amx<16, F>(x, m, from, to);
  }
  const bool by_blocks = FEW_REGISTERS && x.rows > Int8Activations::ROW_GROUP;
  if (x.rows > MANY_ROWS || (by_blocks && !F::SHARES_ACT_SCALE)) return matmul_many_rows<F>(x, m, from, to);
  static thread_local Scratch interleave_scratch;
  for (int64_t out = from; out < to; out += LANES) {
    const OutputVector outputs(m, out);
    const InterleavedRows in = outputs.interleaved_weights<F>(m, 0, x.n_in, interleave_scratch);
    if constexpr (FEW_REGISTERS && F::SHARES_ACT_SCALE) {
      if (by_blocks) {
        matmul_by_blocks<F>(x, m, outputs, in);
        continue;
      }
    }
    for (int64_t row = 0; row < x.rows; row += Int8Activations::ROW_GROUP) {
      dispatch_rows(x.group_rows(row), [&](auto group_rows) { matmul_few_rows<F, group_rows.value>(x, row, m, outputs, in, row == 0); });
    }
  }
}

}  // namespace

int64_t sub_blocks_per_act_scale(Format format) {
  int64_t sub_blocks = 0;
  dispatch_format(format, [&](auto f) { sub_blocks = decltype(f)::SUB_BLOCKS_PER_ACT_SCALE; });
  return sub_blocks;
}

Int8Activations int8_activations(int64_t rows, int64_t n_in, int64_t sub_blocks) {
  Int8Activations result{nullptr, nullptr, rows, n_in, sub_blocks, 0};
  if (!HAVE_AMX || sub_blocks == 1 || rows < AMX_MIN_ROWS) return result;
  // Splits rows evenly into as few tiles as possible, of 8, 12 or 16 rows.
  const int64_t n_tiles = (rows + 15) / 16, max_rows = (rows + n_tiles - 1) / n_tiles;
  result.tile_rows = max_rows <= 8 ? 8 : max_rows <= 12 ? 12 : 16;
  return result;
}

void int8_outputs(const Int8Activations &x, const Matrix &m, int64_t from, int64_t to) {
  dispatch_format(m.format, [&](auto f) { matmul_outputs<decltype(f)>(x, m, from, to); });
}

Status longdraft_repack(const void *w, Format format, int64_t n_out, int64_t n_in, int64_t w_stride, void *repacked, int threads) try {
  dispatch_format(format, [=](auto f) {
    using F = decltype(f);
    parallel_for(threads, n_out / LANES, [=](int64_t i) {
      const int64_t blocks = n_in / F::WEIGHTS;
      repack<F>(static_cast<const byte *>(w) + i * LANES * w_stride, w_stride, blocks,
               static_cast<byte *>(repacked) + i * LANES * blocks * F::BYTES);
    });
  });
  return OK;
} CATCH_EXCEPTIONS
