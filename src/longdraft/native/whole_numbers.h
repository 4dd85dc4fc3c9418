// Rows of x as integers of thirteen bits and a scale, and sums of their products with integer weights: for drafts (rounded.cpp,
// nibbled.cpp). Sums are the same for every instruction set.
#pragma once

#include "vectors.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

using std::int64_t;

typedef std::int16_t pairs __attribute__((vector_size(4 * LANES)));

// Each lane of the sum plus the products of two numbers.
inline ivec plus(ivec sum, pairs a, pairs b) {
#if defined(__AVX512VNNI__)
  return (ivec)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
  return sum + (ivec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return sum + (ivec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__aarch64__)
  const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
  return sum + (ivec)vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
#else
  for (int i = 0; i < LANES; i++) sum[i] += a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
  return sum;
#endif
}

// Rounds a row of x to numbers of at most `limit`, and returns its scale, which is NaN if the row has a NaN or infinity.
float round_row(const float *x, int64_t size, float limit, std::int16_t *to, int64_t padded) {
  constexpr float SHIFT = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, kept in the lowest bits
  vec most = {}, zeros = {};
  const auto look = [&](vec a) {
    most = larger(a, larger(-a, most));
    zeros += a * 0.0f;
  };
  int64_t whole = 0;
  for (; whole + LANES <= size; whole += LANES) look(load(x + whole));
  if (whole < size) look(load_some(x + whole, size - whole));
  const float largest = across<Larger, 1>(&most)[0], factor = limit / largest;
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
  return largest / limit + sums<1>(&zeros)[0];
}

}  // namespace
