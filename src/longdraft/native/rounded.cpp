// y = x W^T + b with both rounded to whole numbers: for drafts, which need not be exact.
//
// A row of W is numbers of eight bits and a scale, a row of x becomes numbers of thirteen bits and a scale. Two products
// and their sum are one operation then, and unpacking a weight is one for two: a dozen rows take a quarter of the time.
#include "rounded.h"
#include "tiles.h"
#include "vectors.h"

#include <algorithm>
#include <cmath>

using std::int64_t;

namespace {

constexpr int64_t SHARE = 24;   // outputs that a thread takes at a time: whole tiles of every shape
constexpr float MOST = 4095.0f;  // of a number of x: sums of 16,384 products still fit 32 bits, in vectors of four lanes

typedef std::int16_t shorts __attribute__((vector_size(4 * LANES)));
typedef std::int16_t unaligned_shorts __attribute__((vector_size(4 * LANES), aligned(2), may_alias));

// 2 x LANES weights. (Compilers convert such vectors one number at a time.)
inline shorts weights(const std::int8_t *p) {
#if defined(__AVX512BW__)
  return (shorts)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
#elif defined(__AVX2__)
  return (shorts)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
#else
  shorts x;
  for (int i = 0; i < 2 * LANES; i++) x[i] = p[i];
  return x;
#endif
}

// Each lane of the sum plus the products of two numbers.
inline ivec plus(ivec sum, shorts a, shorts b) {
#if defined(__AVX512BW__)
  return sum + (ivec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return sum + (ivec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  for (int i = 0; i < LANES; i++) sum[i] += a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
  return sum;
#endif
}

struct Rows {
  const std::int16_t *x;  // (rows, size)
  const float *scales;    // (rows,)
  int64_t rows, size;     // size: of a row, whole vectors

  template <int R, int O>
  void tile(const Matrix &m, int64_t out, Group group) const;
};

// The group's R rows of x times O rows of W from `out` on.
template <int R, int O>
inline void Rows::tile(const Matrix &m, int64_t out, Group group) const {
  const int64_t row = group.row;
  const std::int8_t *w = static_cast<const std::int8_t *>(m.w) + out * m.w_row;
  const std::int16_t *rows_of_x = x + row * size;
  ivec acc[R * O] = {};
  for (int64_t i = 0; i < size; i += 2 * LANES) {
    shorts b[O];
    UNROLLED for (int o = 0; o < O; o++) {
      b[o] = weights(w + o * m.w_row + i);
      __builtin_prefetch(w + (O + o) * m.w_row + i);
    }
    UNROLLED for (int r = 0; r < R; r++) {
      const shorts a = *reinterpret_cast<const unaligned_shorts *>(rows_of_x + r * size + i);
      UNROLLED for (int o = 0; o < O; o++) acc[r * O + o] = plus(acc[r * O + o], a, b[o]);
    }
  }
  constexpr int N = R * O, WHOLE = (N + LANES - 1) / LANES * LANES;
  vec sum[WHOLE] = {};
  UNROLLED for (int i = 0; i < N; i++) sum[i] = __builtin_convertvector(acc[i], vec);
  float found[WHOLE];
  for (int i = 0; i < N; i += LANES) store(found + i, sums<LANES>(sum + i));
  for (int o = 0; o < O; o++) {
    float scale;
    std::memcpy(&scale, w + o * m.w_row + size, sizeof scale);
    for (int r = 0; r < R; r++) {
      float &y = m.y[(row + r) * m.outs + out + o];
      y = (m.adds ? y : 0.0f) + (found[r * O + o] * (scale * scales[row + r]) + (m.bias ? m.bias[out + o] : 0.0f));
    }
  }
}

// Rounds a row of x; returns its scale. Where one number is none, the row has none: its scale is NaN.
float round_row(const float *x, int64_t size, std::int16_t *to, int64_t padded) {
  constexpr float SHIFT = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, kept in the lowest bits
  vec most = {}, zeros = {};
  const auto look = [&](vec a) {
    most = larger(a, larger(-a, most));
    zeros += a * 0.0f;
  };
  int64_t whole = 0;
  for (; whole + LANES <= size; whole += LANES) look(load(x + whole));
  if (whole < size) look(load_some(x + whole, size - whole));
  const float largest = across<Larger, 1>(&most)[0], factor = MOST / largest;
  if (!std::isfinite(factor)) {  // nothing, or next to it; or too much
    std::fill_n(to, padded, std::int16_t{0});
    return sums<1>(&zeros)[0];
  }
  for (int64_t i = 0; i < size; i++) {
    const float shifted = x[i] * factor + SHIFT;
    std::int32_t bits, zero;
    std::memcpy(&bits, &shifted, sizeof bits);
    std::memcpy(&zero, &SHIFT, sizeof zero);
    to[i] = static_cast<std::int16_t>(bits - zero);
  }
  std::fill(to + size, to + padded, std::int16_t{0});
  return largest / MOST + sums<1>(&zeros)[0];
}

void share(const Rows &in, const Matrix &m, int64_t from, int64_t to) {
  if constexpr (TILE == 24) {
    if (in.rows <= 3) return outputs<3, 8>(in, m, from, to);
    if (in.rows <= 4) return outputs<4, 6>(in, m, from, to);
    if (in.rows <= 6 || (in.rows > 8 && in.rows <= 12)) return outputs<6, 4>(in, m, from, to);
    return outputs<8, 3>(in, m, from, to);
  } else {
    if (in.rows <= 2) return outputs<2, 6>(in, m, from, to);
    if (in.rows <= 4) return outputs<4, 3>(in, m, from, to);
    return outputs<6, 2>(in, m, from, to);
  }
}

}  // namespace

void rounded_linear(const float *x, int64_t rows, int64_t size, const Matrix *matrices, int64_t count, int threads) {
  static thread_local Scratch scratch;
  const int64_t padded = (size + ROUNDED_UNIT - 1) / ROUNDED_UNIT * ROUNDED_UNIT;
  const int64_t of_scales = Scratch::whole_lines(rows);
  float *scales = scratch.of(of_scales + rows * padded / 2 + 16);
  std::int16_t *numbers = reinterpret_cast<std::int16_t *>(scales + of_scales);
  for (int64_t r = 0; r < rows; r++) scales[r] = round_row(x + r * size, size, numbers + r * padded, padded);
  const Rows in{numbers, scales, rows, padded};
  share_outputs<SHARE>(matrices, count, threads,
                       [&](const Matrix &m, int64_t from, int64_t to) { share(in, m, from, to); });
}
