// Columns of LANES rows of bytes: four bytes of each row, or a half, become one vector with a lane a row.
#pragma once

#include "stored.h"
#include "vectors.h"

#include <cstdint>
#include <cstring>

namespace {

using std::int64_t;

// Unpacked values must stay in registers, which no function call preserves.
#define INLINED __attribute__((always_inline))

// LANES rows: the first one, and bytes from one to the next.
struct Lines {
  const byte *first;
  int64_t row;

  Lines at(int64_t bytes) const { return {first + bytes, row}; }
};

#if defined(__AVX2__)
inline __m128i of_16(const byte *p) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p)); }
inline __m256i of_32(const byte *p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }
#endif

// The next 16 bytes of each row as four columns: lane l of out[i] holds bytes 4i to 4i + 3 of row l.
INLINED inline void columns(Lines in, ivec *out) {
#if defined(__AVX512F__)
  // Rows j, j + 4, j + 8 and j + 12 in one register: then four dwords by four rows are transposed within its quarters.
  const auto of_four = [=](int64_t j) INLINED {
    const byte *p = in.first + j * in.row;
    const __m256i one = _mm256_inserti128_si256(_mm256_castsi128_si256(of_16(p)), of_16(p + 4 * in.row), 1);
    const __m256i two = _mm256_inserti128_si256(_mm256_castsi128_si256(of_16(p + 8 * in.row)), of_16(p + 12 * in.row), 1);
    return _mm512_inserti64x4(_mm512_castsi256_si512(one), two, 1);
  };
  const __m512i a = of_four(0), b = of_four(1), c = of_four(2), d = of_four(3);
  const __m512i ab = _mm512_unpacklo_epi32(a, b), cd = _mm512_unpacklo_epi32(c, d);
  const __m512i ab2 = _mm512_unpackhi_epi32(a, b), cd2 = _mm512_unpackhi_epi32(c, d);
  out[0] = (ivec)_mm512_unpacklo_epi64(ab, cd);
  out[1] = (ivec)_mm512_unpackhi_epi64(ab, cd);
  out[2] = (ivec)_mm512_unpacklo_epi64(ab2, cd2);
  out[3] = (ivec)_mm512_unpackhi_epi64(ab2, cd2);
#elif defined(__AVX2__)
  const auto of_two = [=](int64_t j) INLINED {
    const byte *p = in.first + j * in.row;
    return _mm256_inserti128_si256(_mm256_castsi128_si256(of_16(p)), of_16(p + 4 * in.row), 1);
  };
  const __m256i a = of_two(0), b = of_two(1), c = of_two(2), d = of_two(3);
  const __m256i ab = _mm256_unpacklo_epi32(a, b), cd = _mm256_unpacklo_epi32(c, d);
  const __m256i ab2 = _mm256_unpackhi_epi32(a, b), cd2 = _mm256_unpackhi_epi32(c, d);
  out[0] = (ivec)_mm256_unpacklo_epi64(ab, cd);
  out[1] = (ivec)_mm256_unpackhi_epi64(ab, cd);
  out[2] = (ivec)_mm256_unpacklo_epi64(ab2, cd2);
  out[3] = (ivec)_mm256_unpackhi_epi64(ab2, cd2);
#else
  for (int l = 0; l < LANES; l++) {
    std::int32_t four[4];
    std::memcpy(four, in.first + l * in.row, sizeof four);
    for (int i = 0; i < 4; i++) out[i][l] = four[i];
  }
#endif
}

// The next 32 bytes of each row as eight columns.
INLINED inline void columns_of_32(Lines in, ivec *out) {
#if defined(__AVX512F__)
  // A register holds a row's 32 bytes and those of the row four further: [dwords 0-3, 4-7 of row j, the same of j + 4].
  // Transposed by fours within quarters, dword k of four rows lies in its first and third quarter, k + 4 in the others.
  const auto of_two = [=](int64_t j) INLINED {
    const byte *p = in.first + j * in.row;
    return _mm512_inserti64x4(_mm512_castsi256_si512(of_32(p)), of_32(p + 4 * in.row), 1);
  };
  __m512i quarters[2][4];
  UNROLLED for (int half = 0; half < 2; half++) {
    const __m512i a = of_two(8 * half), b = of_two(8 * half + 1), c = of_two(8 * half + 2), d = of_two(8 * half + 3);
    const __m512i ab = _mm512_unpacklo_epi32(a, b), cd = _mm512_unpacklo_epi32(c, d);
    const __m512i ab2 = _mm512_unpackhi_epi32(a, b), cd2 = _mm512_unpackhi_epi32(c, d);
    quarters[half][0] = _mm512_unpacklo_epi64(ab, cd);
    quarters[half][1] = _mm512_unpackhi_epi64(ab, cd);
    quarters[half][2] = _mm512_unpacklo_epi64(ab2, cd2);
    quarters[half][3] = _mm512_unpackhi_epi64(ab2, cd2);
  }
  UNROLLED for (int k = 0; k < 4; k++) {
    out[k] = (ivec)_mm512_shuffle_i32x4(quarters[0][k], quarters[1][k], 0x88);
    out[k + 4] = (ivec)_mm512_shuffle_i32x4(quarters[0][k], quarters[1][k], 0xdd);
  }
#else
  columns(in, out);
  columns(in.at(16), out + 4);
#endif
}

// The first four bytes of each row.
INLINED inline ivec fours(Lines in) {
  const auto four = [=](int l) {
    std::int32_t x;
    std::memcpy(&x, in.first + l * in.row, sizeof x);
    return x;
  };
#if defined(__AVX2__)
  __m128i quarters[LANES / 4];
  UNROLLED for (int i = 0; i < LANES / 4; i++) {
    quarters[i] = _mm_set_epi32(four(4 * i + 3), four(4 * i + 2), four(4 * i + 1), four(4 * i));
  }
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(quarters[0]), quarters[1], 1);
#if defined(__AVX512F__)
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(quarters[2]), quarters[3], 1);
  return (ivec)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
#else
  return (ivec)low;
#endif
#else
  ivec found;
  for (int l = 0; l < LANES; l++) found[l] = four(l);
  return found;
#endif
}

// The halves in the lower 16 bits of each lane, as floats.
INLINED inline vec halves(ivec x) {
#if defined(__AVX512F__)
  return (vec)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)x));
#elif defined(__AVX2__)
  const __m256i low = _mm256_and_si256((__m256i)x, _mm256_set1_epi32(0xffff));
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x88);
  return (vec)_mm256_cvtph_ps(_mm256_castsi256_si128(packed));
#else
  vec found;
  for (int l = 0; l < LANES; l++) {
    const auto bits = static_cast<std::uint16_t>(x[l]);
    byte bytes[2];
    std::memcpy(bytes, &bits, 2);
    found[l] = half(bytes);
  }
  return found;
#endif
}

// The half that each row begins with, as a float.
INLINED inline vec halves(Lines in) {
#if defined(__AVX2__)
  const auto eight = [=](int64_t first) INLINED {
    __m128i found = _mm_setzero_si128();
    const byte *p = in.first + first * in.row;
    const auto of = [&](int64_t l) { return *reinterpret_cast<const std::uint16_t *>(p + l * in.row); };
    found = _mm_insert_epi16(found, of(0), 0);
    found = _mm_insert_epi16(found, of(1), 1);
    found = _mm_insert_epi16(found, of(2), 2);
    found = _mm_insert_epi16(found, of(3), 3);
    found = _mm_insert_epi16(found, of(4), 4);
    found = _mm_insert_epi16(found, of(5), 5);
    found = _mm_insert_epi16(found, of(6), 6);
    return _mm_insert_epi16(found, of(7), 7);
  };
#if defined(__AVX512F__)
  return (vec)_mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(eight(0)), eight(8), 1));
#else
  return (vec)_mm256_cvtph_ps(eight(0));
#endif
#else
  vec found;
  for (int l = 0; l < LANES; l++) found[l] = half(in.first + l * in.row);
  return found;
#endif
}

}  // namespace
