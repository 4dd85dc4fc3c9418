// y = x W^T + b with both rounded to integers: for drafts, which need not be exact.
//
// A row of W is integers of eight bits and a scale; a row of x becomes integers of thirteen bits and a scale. Two products and
// their sum are then one operation, and so is unpacking two weights. The outputs of a band are adjacent lanes, so no sum is
// gathered from lanes, and integer sums are the same for every instruction set.
#include "rounded.h"
#include "tiles.h"
#include "whole_numbers.h"

namespace {

constexpr int64_t SHARE = 48;              // outputs that a thread takes at a time: whole tiles of every shape
constexpr int64_t VECTORS = BAND / LANES;  // of sums, for a band's outputs

// 2 x LANES weights. (Compilers convert such vectors one number at a time.)
inline pairs weights(const std::int8_t *p) {
#if defined(__AVX512BW__)
  return (pairs)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
#elif defined(__AVX2__)
  return (pairs)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
#elif defined(__aarch64__)
  return (pairs)vmovl_s8(vld1_s8(p));
#else
  pairs x;
  for (int i = 0; i < 2 * LANES; i++) x[i] = p[i];
  return x;
#endif
}

struct Rows {
  const std::int16_t *x;  // (rows, size)
  const float *scales;    // (rows,)
  int64_t rows, size;     // size: of a row, filled up with zeros

  template <int R, int O>
  void tile(const Matrix &m, int64_t band, Group group) const;
};

// The group's R rows of x times O bands of W from `band` on.
template <int R, int O>
inline void Rows::tile(const Matrix &m, int64_t band, Group group) const {
  constexpr int N = O * VECTORS;
  const std::int8_t *w = static_cast<const std::int8_t *>(m.w) + band * m.w_row;
  const std::int16_t *numbers = x + group.row * size;
  ivec acc[R * N] = {};
  // Two inputs at a time. (With four, compilers would regroup sums and run out of registers.)
  for (int64_t i = 0; i < size; i += 2, w += 2 * BAND) {
    pairs b[N];
    UNROLLED for (int o = 0; o < O; o++) __builtin_prefetch(w + (O + o) * m.w_row);
    UNROLLED for (int v = 0; v < N; v++) b[v] = weights(w + v / VECTORS * m.w_row + v % VECTORS * 2 * LANES);
    UNROLLED for (int r = 0; r < R; r++) {
      std::int32_t pair;
      std::memcpy(&pair, numbers + r * size + i, sizeof pair);
      const pairs a = (pairs)(ivec{} + pair);
      UNROLLED for (int v = 0; v < N; v++) acc[r * N + v] = plus(acc[r * N + v], a, b[v]);
    }
  }
  UNROLLED for (int v = 0; v < N; v++) {
    const int64_t out = band * BAND + v * LANES, here = std::min<int64_t>(LANES, m.outs - out);
    if (here <= 0) return;
    const auto read = [=](const float *p) { return here == LANES ? load(p) : load_some(p, here); };
    const vec scale = load(reinterpret_cast<const float *>(w + v / VECTORS * m.w_row) + v % VECTORS * LANES);
    const vec bias = m.bias ? read(m.bias + out) : vec{};
    UNROLLED for (int r = 0; r < R; r++) {
      float *y = m.y + (group.row + r) * m.outs + out;
      vec found = __builtin_convertvector(acc[r * N + v], vec) * (scale * scales[group.row + r]) + bias;
      if (m.adds) found = read(y) + found;
      here == LANES ? store(y, found) : store_some(y, found, here);
    }
  }
}

// Bands [from, to), in tiles that fill the registers. (Without AVX products need some, too.)
void share(const Rows &in, const Matrix &m, int64_t from, int64_t to) {
  if constexpr (LANES == 16) {
    outputs<8, 3>(in, m, from, to);
  } else {
    outputs<LANES == 8 ? 6 : TILE / 6, 1>(in, m, from, to);
  }
}

}  // namespace

void rounded_linear(const float *x, int64_t rows, int64_t size, const Matrix *matrices, int64_t count, int threads) {
  static thread_local Scratch scratch;
  const int64_t padded = (size + ROUNDED_UNIT - 1) / ROUNDED_UNIT * ROUNDED_UNIT;
  // Of numbers of x: thirteen bits, or as many as leave room for the sum of a row's products.
  const float limit = static_cast<float>(std::min<int64_t>(4095, 0x7fffffff / (127 * padded)));
  const int64_t of_scales = Scratch::whole_lines(rows);
  float *scales = scratch.of(of_scales + rows * padded / 2);
  std::int16_t *numbers = reinterpret_cast<std::int16_t *>(scales + of_scales);
  for (int64_t r = 0; r < rows; r++) scales[r] = round_row(x + r * size, size, limit, numbers + r * padded, padded);
  const Rows in{numbers, scales, rows, padded};
  share_outputs<SHARE>(matrices, count, threads, [&](const Matrix &m, int64_t from, int64_t to) {
    share(in, m, from / BAND, (to + BAND - 1) / BAND);
  });
}
