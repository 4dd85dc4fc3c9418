// Computes y = x w^T + bias in float32 arithmetic, for the few rows of a decoding step or a verification.
//
// Up to about ten rows, the time is that of reading w. So each weight is read once for all rows, a tile of sums stays in registers, and
// the weights of a later tile are prefetched. Template arguments: R rows, O outputs of a tile; F a format (quants.h).
#include "matmul.h"
#include "quants.h"
#include "threads.h"

namespace {

constexpr int64_t PREFETCH_BYTES = 4096;  // prefetch distance in quantized weights, in bytes
constexpr int64_t PREFETCH_INPUTS = 16;   // prefetch distance in a transposed matrix, in inputs
constexpr int64_t MAX_REGISTER_ROWS = 8;  // quantized weights are dequantized in registers up to this many rows, else to a buffer

struct Activations {
  const float *x;  // (rows, n_in)
  int64_t rows, n_in;
};

// Stores the horizontal sum of each of N vectors.
template <int N> [[gnu::always_inline]] inline void store_horizontal_sums(const vec *acc, float *sums) {
  store(sums, horizontal_sums<std::min(N, LANES)>(acc));
  if constexpr (N > LANES) store_horizontal_sums<N - LANES>(acc + LANES, sums + LANES);
}

// Adds up the accumulators of a tile (R, O) and writes the outputs: rows from `row` on, outputs from `out` on.
template <int R, int O> [[gnu::always_inline]] inline void write_tile(const vec *acc, const Matrix &m, int64_t row, int64_t out) {
  constexpr int N = R * O;
  float sums[(N + LANES - 1) / LANES * LANES];
  store_horizontal_sums<N>(acc, sums);
  float *y = m.y + row * m.n_out + out;
  UNROLL for (int r = 0; r < R; r++) {
    UNROLL for (int o = 0; o < O; o++) {
      const float before = m.accumulate ? y[r * m.n_out + o] : 0.0f;
      y[r * m.n_out + o] = before + (sums[r * O + o] + (m.bias ? m.bias[out + o] : 0.0f));
    }
  }
}

// Multiplies R rows of x from `row` on with O outputs from `out` on. The rows are group g of n_groups; each group prefetches its part of the
// next outputs' weights.
template <int R, int O>
inline void multiply_tile(const Activations &in, const Matrix &m, int64_t row, int64_t out, int64_t g, int64_t n_groups) {
  const int64_t n_in = in.n_in, w_stride = m.w_stride / 4, step = std::max<int64_t>(1, LANES / n_groups);
  const float *rows_of_x = in.x + row * n_in, *w = static_cast<const float *>(m.w) + out * w_stride;
  Address next = address_of(w) + O * m.w_stride + n_in * g / n_groups * 4;
  vec acc[R * O] = {};
  int64_t i = 0;
  for (; i + LANES <= n_in; i += LANES, next += 4 * step) {
    vec b[O];
    UNROLL for (int o = 0; o < O; o++) {
      b[o] = load(w + o * w_stride + i);
      prefetch(next + o * m.w_stride);
    }
    UNROLL for (int r = 0; r < R; r++) {
      const vec a = load(rows_of_x + r * n_in + i);
      UNROLL for (int o = 0; o < O; o++) acc[r * O + o] = fmadd(a, b[o], acc[r * O + o]);
    }
  }
  if (const int64_t n_left = n_in - i; n_left > 0) {
    UNROLL for (int r = 0; r < R; r++) {
      const vec a = load_partial(rows_of_x + r * n_in + i, n_left);
      UNROLL for (int o = 0; o < O; o++) acc[r * O + o] = fmadd(a, load_partial(w + o * w_stride + i, n_left), acc[r * O + o]);
    }
  }
  write_tile<R, O>(acc, m, row, out);
}

// Computes outputs [from, to) in tiles of at most R rows and O outputs: O outputs for all rows, then the next O outputs.
template <int R, int O> void multiply_tiles(const Activations &in, const Matrix &m, int64_t from, int64_t to) {
  const int64_t n_groups = (in.rows + R - 1) / R, whole_tiles_end = from + (to - from) / O * O;
  for (int64_t out = from; out < whole_tiles_end; out += O) {
    for (int64_t g = 0, row = 0; g < n_groups; g++) {
      const int64_t end = in.rows * (g + 1) / n_groups;
      dispatch<R>(end - row, [&](auto rows) { multiply_tile<rows.value, O>(in, m, row, out, g, n_groups); });
      row = end;
    }
  }
  if constexpr (O > 1) {
    if (whole_tiles_end < to) multiply_tiles<R, 1>(in, m, whole_tiles_end, to);
  }
}

inline void convert_scale(vec x, vec &to) { to = x; }
inline void convert_scale(vec x, float &to) { to = x[0]; }

// A quant block of one row, unpacked to int8 numbers, code - ZERO_POINT, and scales and mins.
template <typename F>
struct UnpackedBlock {
  static constexpr int SCALES_PER_SUB_BLOCK = F::SCALES_PER_SUB_BLOCK, SCALES = F::WEIGHTS / SUB_BLOCK * SCALES_PER_SUB_BLOCK;
  alignas(64) byte codes[F::WEIGHTS];
  std::conditional_t<SCALES == 1, vec, float> scales[SCALES], mins[SCALES];  // a vec stays in a register

  ALWAYS_INLINE void unpack(const byte *block) {
    F::unpack_block(SingleRow{block}, [&](int sub_block, const auto &w, const vec *scale, const vec *min) ALWAYS_INLINE {
      int32x8 all = w(AllColumns{});
      if constexpr (F::HAS_CODEBOOK) all = lookup16(F::CODEBOOK, all);
      all = (int32x8)((uint8x32)all - static_cast<byte>(F::ZERO_POINT));
      std::memcpy(codes + sub_block * SUB_BLOCK, &all, SUB_BLOCK);
      UNROLL for (int s = 0; s < SCALES_PER_SUB_BLOCK; s++) {
        convert_scale(scale[s], scales[sub_block * SCALES_PER_SUB_BLOCK + s]);
        if constexpr (F::HAS_MIN) convert_scale(min[s], mins[sub_block * SCALES_PER_SUB_BLOCK + s]);
      }
    });
  }

  // Returns LANES dequantized weights: vector number `vector` of a sub-block.
  ALWAYS_INLINE vec dequantize(int sub_block, int vector) const {
    const int s = sub_block * SCALES_PER_SUB_BLOCK + vector * SCALES_PER_SUB_BLOCK / VECTORS_PER_SUB_BLOCK;
    const vec x = to_float(load_i8(codes + sub_block * SUB_BLOCK + vector * LANES));
    // Rounds once, as x * scale + min does, where the product is exact. Subtracting vec{} broadcasts a float, and leaves a vec as it is.
    if constexpr (F::HAS_MIN) return fmadd(x, scales[s] - vec{}, mins[s] - vec{});
    return x * scales[s];
  }
};

// A block of 32 16-bit floats, of type E. UnpackedBlock has no work to do for it.
template <typename E>
struct HalfBlock {
  static constexpr int WEIGHTS = SUB_BLOCK, BYTES = 2 * SUB_BLOCK;
};

template <typename E>
struct UnpackedBlock<HalfBlock<E>> {
  const E *values;

  void unpack(const byte *block) { values = reinterpret_cast<const E *>(block); }
  vec dequantize(int, int vector) const { return load(values + vector * LANES); }
};

// Does multiply_tile() for quantized weights and all rows of x, which are R. It has the bits of multiply_tile() on the dequantized weights,
// because additions have the same order.
template <typename F, int R, int O> inline void multiply_quantized_tile(const Activations &in, const Matrix &m, int64_t out) {
  const float *x = in.x;
  const byte *w = static_cast<const byte *>(m.w) + out * m.w_stride;
  Address next = address_of(w) + PREFETCH_BYTES;
  vec acc[R * O] = {};
  for (int64_t i = 0; i < in.n_in; i += F::WEIGHTS, w += F::BYTES, next += O * F::BYTES) {
    // The tile's rows of w lie one behind the other, so the next O * BYTES bytes at `next` are prefetched.
    UNROLL for (int line = 0; line < O * F::BYTES; line += 64) prefetch(next + line);
    UnpackedBlock<F> blocks[O];
    UNROLL for (int o = 0; o < O; o++) blocks[o].unpack(w + o * m.w_stride);
    for (int sub_block = 0; sub_block < F::WEIGHTS / SUB_BLOCK; sub_block++, x += SUB_BLOCK) {
      UNROLL for (int vector = 0; vector < VECTORS_PER_SUB_BLOCK; vector++) {
        vec b[O];
        UNROLL for (int o = 0; o < O; o++) b[o] = blocks[o].dequantize(sub_block, vector);
        UNROLL for (int r = 0; r < R; r++) {
          const vec a = load(x + r * in.n_in + vector * LANES);
          UNROLL for (int o = 0; o < O; o++) acc[r * O + o] = fmadd(a, b[o], acc[r * O + o]);
        }
      }
    }
  }
  write_tile<R, O>(acc, m, 0, out);
}

// Dequantizes a row of w.
template <typename F> void dequantize_row(const byte *w, int64_t n_in, float *out) {
  for (int64_t i = 0; i < n_in; i += F::WEIGHTS, w += F::BYTES) {
    UnpackedBlock<F> block;
    block.unpack(w);
    for (int sub_block = 0; sub_block < F::WEIGHTS / SUB_BLOCK; sub_block++, out += SUB_BLOCK) {
      UNROLL for (int v = 0; v < VECTORS_PER_SUB_BLOCK; v++) store(out + v * LANES, block.dequantize(sub_block, v));
    }
  }
}

// Computes outputs [from, to) of a float32 matrix. Tiles have as many outputs as fit the registers, so that each load of x serves many.
void matmul_range(const Activations &in, const Matrix &m, int64_t from, int64_t to) {
  if constexpr (MAX_SUMS == 24) {
    if (in.rows <= 3) return multiply_tiles<3, 8>(in, m, from, to);
    return multiply_tiles<4, 6>(in, m, from, to);
  } else {
    if (in.rows <= 2) return multiply_tiles<2, 6>(in, m, from, to);
    if (in.rows <= 3) return multiply_tiles<3, 4>(in, m, from, to);
    if (in.rows <= 4 || (in.rows > 6 && in.rows <= 8)) return multiply_tiles<4, 3>(in, m, from, to);
    return multiply_tiles<6, 2>(in, m, from, to);
  }
}

// Multiplies R rows with V vectors of outputs of a transposed matrix (n_in, n_out). last_lanes: number of outputs in the last vector.
template <int R, int V>
void multiply_transposed_tile(const Activations &in, const Matrix &m, int64_t row, int64_t out, int64_t last_lanes) {
  const float *x = in.x + row * in.n_in, *w = static_cast<const float *>(m.w) + out;
  const int64_t w_stride = m.w_stride / 4;
  vec acc[R * V] = {};
  for (int64_t i = 0; i < in.n_in; i++, w += w_stride) {
    vec b[V];
    UNROLL for (int v = 0; v < V; v++) {
      b[v] = v < V - 1 || last_lanes == LANES ? load(w + v * LANES) : load_partial(w + v * LANES, last_lanes);
      prefetch(address_of(w + v * LANES) + PREFETCH_INPUTS * m.w_stride);
    }
    UNROLL for (int r = 0; r < R; r++) {
      const vec a = broadcast(x[r * in.n_in + i]);
      UNROLL for (int v = 0; v < V; v++) acc[r * V + v] = fmadd(a, b[v], acc[r * V + v]);
    }
  }
  UNROLL for (int r = 0; r < R; r++) {
    UNROLL for (int v = 0; v < V; v++) {
      float *y = m.y + (row + r) * m.n_out + out + v * LANES;
      const int64_t lanes = v < V - 1 ? LANES : last_lanes;
      vec sums = acc[r * V + v];
      if (m.bias) sums += load_partial(m.bias + out + v * LANES, lanes);
      store_partial(y, m.accumulate ? load_partial(y, lanes) + sums : sums, lanes);
    }
  }
}

// Computes outputs [from, to) of a transposed matrix.
void transposed_range(const Activations &in, const Matrix &m, int64_t from, int64_t to) {
  constexpr int MAX_ROWS = 4;
  for (int64_t row = 0; row < in.rows; row += MAX_ROWS) {
    dispatch<MAX_ROWS>(std::min<int64_t>(MAX_ROWS, in.rows - row), [&](auto rows) {
      int64_t out = from;
      for (; out + 2 * LANES <= to; out += 2 * LANES) multiply_transposed_tile<rows.value, 2>(in, m, row, out, LANES);
      for (; out < to; out += LANES) multiply_transposed_tile<rows.value, 1>(in, m, row, out, std::min<int64_t>(LANES, to - out));
    });
  }
}

// Computes outputs [from, to) of a quantized matrix. For few rows, weights are dequantized in registers; for more rows, and for outputs that
// do not fill a tile, in a buffer.
template <typename F> void quantized_range(const Activations &in, const Matrix &m, int64_t from, int64_t to) {
  // Sums of up to MAX_ROWS_OF_4 rows leave registers for 4 outputs at a time. With more rows, OUTPUTS outputs are computed at a time.
  constexpr int MAX_ROWS_OF_4 = LANES == 16 ? 5 : 3, OUTPUTS = MAX_SUMS == 12 ? 1 : LANES == 4 ? 2 : 3;
  if (in.rows <= MAX_ROWS_OF_4) {
    dispatch<MAX_ROWS_OF_4>(in.rows, [&](auto rows) {
      for (; from + 4 <= to; from += 4) multiply_quantized_tile<F, rows.value, 4>(in, m, from);
    });
  } else if (in.rows <= MAX_REGISTER_ROWS) {
    dispatch<MAX_REGISTER_ROWS, MAX_ROWS_OF_4 + 1>(in.rows, [&](auto rows) {
      for (; from + OUTPUTS <= to; from += OUTPUTS) multiply_quantized_tile<F, rows.value, OUTPUTS>(in, m, from);
    });
  }
  if (from == to) return;
  static thread_local Scratch scratch;
  float *dequantized = scratch.get((to - from) * in.n_in);
  for (int64_t o = from; o < to; o++) {
    dequantize_row<F>(static_cast<const byte *>(m.w) + o * m.w_stride, in.n_in, dequantized + (o - from) * in.n_in);
  }
  // A matrix of the remaining outputs alone: output `from` is its output 0.
  const float *bias = m.bias ? m.bias + from : nullptr;
  matmul_range(in, Matrix{dequantized, bias, m.y + from, 4 * in.n_in, m.n_out, m.accumulate, Format::FLOAT32, 0}, 0, to - from);
}

// Calls f with the format as dispatch_format() does, or with HalfBlock for a 16-bit float.
template <typename Fn> void dispatch_stored_format(Format format, const Fn &f) {
  if (format == Format::BF16) return f(HalfBlock<BFloat16>{});
  if (format == Format::F16) return f(HalfBlock<Float16>{});
  dispatch_format(format, f);
}

}  // namespace

Status longdraft_dequantize(const void *w, Format format, int64_t rows, int64_t n_in, int64_t w_stride, float *out, int threads) try {
  dispatch_stored_format(format, [=](auto f) {
    parallel_for(threads, rows, [=](int64_t r) {
      dequantize_row<decltype(f)>(static_cast<const byte *>(w) + r * w_stride, n_in, out + r * n_in);
    });
  });
  return OK;
} CATCH_EXCEPTIONS

void float_outputs(const float *x, int64_t rows, int64_t n_in, const Matrix &m, int64_t from, int64_t to) {
  const Activations in{x, rows, n_in};
  if (m.format == Format::FLOAT32_TRANSPOSED) return transposed_range(in, m, from, to);
  if (m.format == Format::FLOAT32) return matmul_range(in, m, from, to);
  dispatch_stored_format(m.format, [&](auto f) { quantized_range<decltype(f)>(in, m, from, to); });
}
