// y = x W^T + b for a few rows of x: the products of a verification.
//
// Reading W is the limit for a single row, and for about ten rows if arithmetic and reading overlap. So each weight is read
// once for all rows, a tile of sums stays in registers, and while one tile is computed the weights of a later tile are fetched.
#include "int8.h"
#include "kernels.h"
#include "outputs.h"
#include "stored_k.h"
#include "tiles.h"
#include "vectors.h"

#include <algorithm>

using std::int64_t;

namespace {

constexpr int64_t SHARE = 24;    // outputs that a thread takes at a time: whole tiles of every shape
constexpr int64_t AHEAD = 4096;  // bytes by which stored weights are fetched ahead
constexpr int64_t INPUTS_AHEAD = 16;  // inputs whose weights are fetched ahead where they lie side by side
constexpr int64_t FEW = 8;       // rows up to which stored weights are unpacked in registers, again for each group of rows

struct Rows {
  const float *x;  // (rows, size)
  int64_t rows, size;

  template <int R, int O>
  void tile(const Matrix &m, int64_t out, Group group) const;
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

// The group's R rows of x times O rows of W from `out` on. Meanwhile each group fetches its part of the next tile.
template <int R, int O>
inline void Rows::tile(const Matrix &m, int64_t out, Group group) const {
  const int64_t w_row = m.w_row / 4, step = std::max<int64_t>(1, LANES / group.groups);
  const float *rows_of_x = x + group.row * size, *w = static_cast<const float *>(m.w) + out * w_row;
  const float *next = w + O * w_row + size * group.number / group.groups;
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
  finish<R, O>(acc, m, group.row, out);
}

// The same for stored weights: in the same order, so with the same bits as for the unpacked floats.
template <typename F, int R, int O>
inline void stored_tile(const Rows &in, const Matrix &m, int64_t row, int64_t out) {
  const float *x = in.x + row * in.size;
  const byte *w = static_cast<const byte *>(m.w) + out * m.w_row;
  const byte *next = w + AHEAD;
  vec acc[R * O] = {};
  for (int64_t i = 0; i < in.size; i += F::WEIGHTS, w += F::BYTES, next += O * F::BYTES) {
    // A tile's rows lie one behind the other.
    UNROLLED for (int line = 0; line < O * F::BYTES; line += 64) __builtin_prefetch(next + line);
    typename F::Block blocks[O];
    UNROLLED for (int o = 0; o < O; o++) F::open(w + o * m.w_row, blocks[o]);
    for (int piece = 0; piece < F::WEIGHTS / PIECE; piece++, x += PIECE) {
      typename F::Scale scales[O];
      UNROLLED for (int o = 0; o < O; o++) scales[o] = F::scale(blocks[o], piece);
      UNROLLED for (int part = 0; part < PARTS; part++) {
        vec b[O];
        UNROLLED for (int o = 0; o < O; o++) b[o] = F::part(blocks[o], piece, part, scales[o]);
        UNROLLED for (int r = 0; r < R; r++) {
          const vec a = load(x + r * in.size + part * LANES);
          UNROLLED for (int o = 0; o < O; o++) acc[r * O + o] = fused(a, b[o], acc[r * O + o]);
        }
      }
    }
  }
  finish<R, O>(acc, m, row, out);
}

// R rows or fewer, LEAST at least.
template <typename F, int R, int O, int LEAST>
inline void stored_tile_of(int64_t rows, const Rows &in, const Matrix &m, int64_t out) {
  if (rows == R) return stored_tile<F, R, O>(in, m, 0, out);
  if constexpr (R > LEAST) stored_tile_of<F, R - 1, O, LEAST>(rows, in, m, out);
}

template <typename F>
void unpack(const byte *w, int64_t size, float *out) {
  for (int64_t i = 0; i < size; i += F::WEIGHTS, w += F::BYTES) {
    typename F::Block block;
    F::open(w, block);
    for (int piece = 0; piece < F::WEIGHTS / PIECE; piece++, out += PIECE) {
      const typename F::Scale scale = F::scale(block, piece);
      UNROLLED for (int part = 0; part < PARTS; part++) store(out + part * LANES, F::part(block, piece, part, scale));
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

template <int R, int V>
void by_input_tile_of(int64_t rows, const Rows &in, const Matrix &m, int64_t row, int64_t out, int64_t count) {
  if (rows == R) return by_input_tile<R, V>(in, m, row, out, count);
  if constexpr (R > 1) by_input_tile_of<R - 1, V>(rows, in, m, row, out, count);
}

void by_input_share(const Rows &in, const Matrix &m, int64_t from, int64_t to) {
  constexpr int MOST = 4;
  for (int64_t row = 0; row < in.rows; row += MOST) {
    const int64_t rows = std::min<int64_t>(MOST, in.rows - row);
    int64_t out = from;
    for (; out + 2 * LANES <= to; out += 2 * LANES) by_input_tile_of<MOST, 2>(rows, in, m, row, out, LANES);
    for (; out < to; out += LANES) {
      by_input_tile_of<MOST, 1>(rows, in, m, row, out, std::min<int64_t>(LANES, to - out));
    }
  }
}

// Stored weights: for few rows they are unpacked in registers; for more rows a share is unpacked once into the cache. So are
// outputs that do not fill a tile.
template <typename F>
void stored_share(const Rows &in, const Matrix &m, int64_t from, int64_t to) {
  // Rows that leave registers for four outputs at a time, and outputs that more rows leave registers for.
  constexpr int NARROW = LANES == 16 ? 5 : 3, WIDE = TILE == 12 ? 1 : LANES == 4 ? 2 : 3;
  if (in.rows <= NARROW) {
    for (; from + 4 <= to; from += 4) stored_tile_of<F, NARROW, 4, 1>(in.rows, in, m, from);
  } else if (in.rows <= FEW) {
    for (; from + WIDE <= to; from += WIDE) stored_tile_of<F, FEW, WIDE, NARROW + 1>(in.rows, in, m, from);
  }
  if (from == to) return;
  static thread_local Scratch scratch;
  float *floats = scratch.of((to - from) * in.size);
  for (int64_t o = from; o < to; o++) {
    unpack<F>(static_cast<const byte *>(m.w) + o * m.w_row, in.size, floats + (o - from) * in.size);
  }
  // Its first output is number `from`.
  share(in, Matrix{floats - from * in.size, m.bias, m.y, 4 * in.size, m.outs, m.adds, 0}, from, to);
}

template <typename What>
void with_format(int64_t format, const What &what) {
  switch (format) {
    case 1: return what(Q4_0{});
    case 2: return what(Q4_1{});
    case 3: return what(Q8_0{});
    case 4: return what(Q4_K{});
    case 5: return what(Q5_K{});
    case 6: return what(Q6_K{});
    case 7: return what(Bfloat16{});
    case 8: return what(Float16{});
    case 9: return what(Q5_0{});
    case 10: return what(Q5_1{});
    case 11: return what(Q2_K{});
    case 12: return what(Q3_K{});
    case 13: return what(IQ4_NL{});
    case 14: return what(IQ4_XS{});
    case 15: return what(MXFP4{});
  }
}

}  // namespace

Code longdraft_unpack(const void *w, int64_t format, int64_t rows, int64_t size, int64_t w_row, float *out, int threads) try {
  with_format(format, [=](auto f) {
    share_out(threads, rows, [=](int64_t r) {
      unpack<decltype(f)>(static_cast<const byte *>(w) + r * w_row, size, out + r * size);
    });
  });
  return DONE;
} CATCH_NO_MEMORY

void float_outputs(const float *x, int64_t rows, int64_t size, const Matrix &m, int64_t from, int64_t to) {
  const Rows in{x, rows, size};
  if (m.format == BY_INPUT) return by_input_share(in, m, from, to);
  if (!m.format) return share(in, m, from, to);
  with_format(m.format, [&](auto f) { stored_share<decltype(f)>(in, m, from, to); });
}

Code longdraft_linear(const float *x, int64_t rows, int64_t size, const Matrix *matrices, int64_t count, int threads) try {
  const bool rounds = std::any_of(matrices, matrices + count, [](const Matrix &m) { return m.int8; });
  const Int8Rows rounded = rounds ? int8_rows(x, rows, size, threads) : Int8Rows{};
  const auto compute = [&](const Matrix &m, int64_t from, int64_t to) {
    if (m.int8) return int8_outputs(rounded, m, from, to);
    float_outputs(x, rows, size, m, from, to);
  };
  if (!rounds) return share_outputs<SHARE>(matrices, count, threads, compute), DONE;
  if (rows <= FEW) return share_outputs<2 * INT8_UNIT>(matrices, count, threads, compute), DONE;
  share_outputs<8 * INT8_UNIT>(matrices, count, threads, compute);
  return DONE;
} CATCH_NO_MEMORY

int longdraft_lanes() { return LANES; }
