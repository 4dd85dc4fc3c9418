// y = x W^T + b for a few rows of x: the products of a verification.
//
// Reading W is the limit for a single row, and for about ten rows if arithmetic and reading overlap. So each weight is read
// once for all rows, a tile of sums stays in registers, and while one tile is computed the weights of a later tile are fetched.
#include "formats.h"
#include "products.h"
#include "threads.h"
#include "vectors.h"

#include <algorithm>

namespace {

constexpr int64_t AHEAD = 4096;  // bytes by which stored weights are fetched ahead
constexpr int64_t INPUTS_AHEAD = 16;  // inputs whose weights are fetched ahead where they lie side by side
constexpr int64_t FEW = 8;       // rows up to which stored weights are unpacked in registers, again for each group of rows

struct Rows {
  const float *x;  // (rows, size)
  int64_t rows, size;
};

// Writes the sums of N vectors.
template <int N>
[[gnu::always_inline]] inline void add_up(const vec *acc, float *found) {
  store(found, sums<std::min(N, LANES)>(acc));
  if constexpr (N > LANES) add_up<N - LANES>(acc + LANES, found + LANES);
}

// Adds up the lanes of a tile's sums and writes the results.
template <int R, int O>
[[gnu::always_inline]] inline void finish(const vec *acc, const Matrix &m, int64_t row, int64_t out) {
  constexpr int N = R * O;
  float found[(N + LANES - 1) / LANES * LANES];
  add_up<N>(acc, found);
  float *y = m.y + row * m.outs + out;
  UNROLLED for (int r = 0; r < R; r++) {
    UNROLLED for (int o = 0; o < O; o++) {
      const float before = m.adds ? y[r * m.outs + o] : 0.0f;
      y[r * m.outs + o] = before + (found[r * O + o] + (m.bias ? m.bias[out + o] : 0.0f));
    }
  }
}

// R rows of x from `row` on, number g of all groups of rows, times O rows of W from `out` on. Meanwhile each group fetches its
// part of the next tile.
template <int R, int O>
inline void tile(const Rows &in, const Matrix &m, int64_t row, int64_t out, int64_t g, int64_t groups) {
  const int64_t size = in.size, w_row = m.w_row / 4, step = std::max<int64_t>(1, LANES / groups);
  const float *rows_of_x = in.x + row * size, *w = static_cast<const float *>(m.w) + out * w_row;
  const float *next = w + O * w_row + size * g / groups;
  vec acc[R * O] = {};
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES, next += step) {
    vec b[O];
    UNROLLED for (int o = 0; o < O; o++) {
      b[o] = load(w + o * w_row + i);
      __builtin_prefetch(next + o * w_row);
    }
    UNROLLED for (int r = 0; r < R; r++) {
      const vec a = load(rows_of_x + r * size + i);
      UNROLLED for (int o = 0; o < O; o++) acc[r * O + o] = fused(a, b[o], acc[r * O + o]);
    }
  }
  if (const int64_t rest = size - i; rest > 0) {
    UNROLLED for (int r = 0; r < R; r++) {
      const vec a = load_some(rows_of_x + r * size + i, rest);
      UNROLLED for (int o = 0; o < O; o++) {
        acc[r * O + o] = fused(a, load_some(w + o * w_row + i, rest), acc[r * O + o]);
      }
    }
  }
  finish<R, O>(acc, m, row, out);
}

// Outputs [from, to) of all rows, at most R rows and O outputs at a time: a few rows of W are multiplied with all rows of x, then
// the next few.
template <int R, int O>
void outputs(const Rows &in, const Matrix &m, int64_t from, int64_t to) {
  const int64_t groups = (in.rows + R - 1) / R, whole = from + (to - from) / O * O;
  for (int64_t out = from; out < whole; out += O) {
    for (int64_t g = 0, row = 0; g < groups; g++) {
      const int64_t end = in.rows * (g + 1) / groups;
      with_number<R>(end - row, [&](auto rows) { tile<rows.value, O>(in, m, row, out, g, groups); });
      row = end;
    }
  }
  if constexpr (O > 1) {
    if (whole < to) outputs<R, 1>(in, m, whole, to);
  }
}

inline void keep(vec x, vec &to) { to = x; }
inline void keep(vec x, float &to) { to = x[0]; }

// A block of one row, opened: a byte for each weight, and the scales.
template <typename F>
struct Opened {
  static constexpr int EACH = F::SCALES, SCALES = F::WEIGHTS / PIECE * EACH;
  alignas(64) byte q[F::WEIGHTS];
  std::conditional_t<SCALES == 1, vec, float> scales[SCALES], leasts[SCALES];  // the former in registers

  INLINED void open(const byte *block) {
    F::block(Row{block}, [&](int piece, const auto &w, const vec *scale, const vec *least) INLINED {
      wide all = w(Whole{});
      if constexpr (F::LISTED) all = looked_up(F::LIST, all);
      all = (wide)((wide_bytes)all - static_cast<byte>(F::ZERO));
      std::memcpy(q + piece * PIECE, &all, PIECE);
      UNROLLED for (int s = 0; s < EACH; s++) {
        keep(scale[s], scales[piece * EACH + s]);
        if constexpr (F::LEAST) keep(least[s], leasts[piece * EACH + s]);
      }
    });
  }

  INLINED vec part(int piece, int number) const {
    const int s = piece * EACH + number * EACH / PARTS;
    const vec x = floats(signed_bytes(q + piece * PIECE + number * LANES));
    if constexpr (F::LEAST) return fused(x, scales[s] - vec{}, leasts[s] - vec{});  // the product is exact: the same bits
    return x * scales[s];
  }
};

template <typename E>
struct Halves {
  static constexpr int WEIGHTS = PIECE, BYTES = 2 * PIECE;
};

template <typename E>
struct Opened<Halves<E>> {
  const E *numbers;

  void open(const byte *block) { numbers = reinterpret_cast<const E *>(block); }
  vec part(int, int number) const { return load(numbers + number * LANES); }
};

// The same for stored weights: in the same order, so with the same bits as for the unpacked floats.
template <typename F, int R, int O>
inline void stored_tile(const Rows &in, const Matrix &m, int64_t out) {
  const float *x = in.x;
  const byte *w = static_cast<const byte *>(m.w) + out * m.w_row;
  const byte *next = w + AHEAD;
  vec acc[R * O] = {};
  for (int64_t i = 0; i < in.size; i += F::WEIGHTS, w += F::BYTES, next += O * F::BYTES) {
    // A tile's rows lie one behind the other.
    UNROLLED for (int line = 0; line < O * F::BYTES; line += 64) __builtin_prefetch(next + line);
    Opened<F> blocks[O];
    UNROLLED for (int o = 0; o < O; o++) blocks[o].open(w + o * m.w_row);
    for (int piece = 0; piece < F::WEIGHTS / PIECE; piece++, x += PIECE) {
      UNROLLED for (int part = 0; part < PARTS; part++) {
        vec b[O];
        UNROLLED for (int o = 0; o < O; o++) b[o] = blocks[o].part(piece, part);
        UNROLLED for (int r = 0; r < R; r++) {
          const vec a = load(x + r * in.size + part * LANES);
          UNROLLED for (int o = 0; o < O; o++) acc[r * O + o] = fused(a, b[o], acc[r * O + o]);
        }
      }
    }
  }
  finish<R, O>(acc, m, 0, out);
}

template <typename F>
void unpack(const byte *w, int64_t size, float *out) {
  for (int64_t i = 0; i < size; i += F::WEIGHTS, w += F::BYTES) {
    Opened<F> block;
    block.open(w);
    for (int piece = 0; piece < F::WEIGHTS / PIECE; piece++, out += PIECE) {
      UNROLLED for (int part = 0; part < PARTS; part++) store(out + part * LANES, block.part(piece, part));
    }
  }
}

// The tile's shape: as many outputs a load of x as the rows leave registers for.
void share(const Rows &in, const Matrix &m, int64_t from, int64_t to) {
  if constexpr (TILE == 24) {
    if (in.rows <= 3) return outputs<3, 8>(in, m, from, to);
    return outputs<4, 6>(in, m, from, to);
  } else {
    if (in.rows <= 2) return outputs<2, 6>(in, m, from, to);
    if (in.rows <= 3) return outputs<3, 4>(in, m, from, to);
    if (in.rows <= 4 || (in.rows > 6 && in.rows <= 8)) return outputs<4, 3>(in, m, from, to);
    return outputs<6, 2>(in, m, from, to);
  }
}

// A matrix (size, outs), of which an input's weights lie side by side: V vectors of outputs, of the last one `count` lanes.
template <int R, int V>
void by_input_tile(const Rows &in, const Matrix &m, int64_t row, int64_t out, int64_t count) {
  const float *x = in.x + row * in.size, *w = static_cast<const float *>(m.w) + out;
  const int64_t w_row = m.w_row / 4;
  vec acc[R * V] = {};
  for (int64_t i = 0; i < in.size; i++, w += w_row) {
    vec b[V];
    UNROLLED for (int v = 0; v < V; v++) {
      b[v] = v < V - 1 || count == LANES ? load(w + v * LANES) : load_some(w + v * LANES, count);
      __builtin_prefetch(w + INPUTS_AHEAD * w_row + v * LANES);
    }
    UNROLLED for (int r = 0; r < R; r++) {
      const vec a = every(x[r * in.size + i]);
      UNROLLED for (int v = 0; v < V; v++) acc[r * V + v] = fused(a, b[v], acc[r * V + v]);
    }
  }
  UNROLLED for (int r = 0; r < R; r++) {
    UNROLLED for (int v = 0; v < V; v++) {
      float *y = m.y + (row + r) * m.outs + out + v * LANES;
      const int64_t lanes = v < V - 1 ? LANES : count;
      vec found = acc[r * V + v];
      if (m.bias) found += load_some(m.bias + out + v * LANES, lanes);
      store_some(y, m.adds ? load_some(y, lanes) + found : found, lanes);
    }
  }
}

void by_input_share(const Rows &in, const Matrix &m, int64_t from, int64_t to) {
  constexpr int MOST = 4;
  for (int64_t row = 0; row < in.rows; row += MOST) {
    with_number<MOST>(std::min<int64_t>(MOST, in.rows - row), [&](auto rows) {
      int64_t out = from;
      for (; out + 2 * LANES <= to; out += 2 * LANES) by_input_tile<rows.value, 2>(in, m, row, out, LANES);
      for (; out < to; out += LANES) by_input_tile<rows.value, 1>(in, m, row, out, std::min<int64_t>(LANES, to - out));
    });
  }
}

// Stored weights: for few rows they are unpacked in registers; for more rows a share is unpacked once into the cache. So are
// outputs that do not fill a tile.
template <typename F>
void stored_share(const Rows &in, const Matrix &m, int64_t from, int64_t to) {
  // Rows that leave registers for four outputs at a time, and outputs that more rows leave registers for.
  constexpr int NARROW = LANES == 16 ? 5 : 3, WIDE = TILE == 12 ? 1 : LANES == 4 ? 2 : 3;
  if (in.rows <= NARROW) {
    with_number<NARROW>(in.rows, [&](auto rows) {
      for (; from + 4 <= to; from += 4) stored_tile<F, rows.value, 4>(in, m, from);
    });
  } else if (in.rows <= FEW) {
    with_number<FEW, NARROW + 1>(in.rows, [&](auto rows) {
      for (; from + WIDE <= to; from += WIDE) stored_tile<F, rows.value, WIDE>(in, m, from);
    });
  }
  if (from == to) return;
  static thread_local Scratch scratch;
  float *floats = scratch.of((to - from) * in.size);
  for (int64_t o = from; o < to; o++) {
    unpack<F>(static_cast<const byte *>(m.w) + o * m.w_row, in.size, floats + (o - from) * in.size);
  }
  // Its first output is number `from`.
  share(in, Matrix{floats - from * in.size, m.bias, m.y, 4 * in.size, m.outs, m.adds, Format::FLOAT32, 0}, from, to);
}

template <typename What>
void with_format(Format format, const What &what) {
  if (format == Format::BF16) return what(Halves<Brief>{});
  if (format == Format::F16) return what(Halves<Half>{});
  in_blocks(format, what);
}

}  // namespace

Code longdraft_unpack(const void *w, Format format, int64_t rows, int64_t size, int64_t w_row, float *out, int threads) try {
  with_format(format, [=](auto f) {
    share_out(threads, rows, [=](int64_t r) {
      unpack<decltype(f)>(static_cast<const byte *>(w) + r * w_row, size, out + r * size);
    });
  });
  return DONE;
} CATCH_NO_MEMORY

void float_outputs(const float *x, int64_t rows, int64_t size, const Matrix &m, int64_t from, int64_t to) {
  const Rows in{x, rows, size};
  if (m.format == Format::BY_INPUT) return by_input_share(in, m, from, to);
  if (m.format == Format::FLOAT32) return share(in, m, from, to);
  with_format(m.format, [&](auto f) { stored_share<decltype(f)>(in, m, from, to); });
}
