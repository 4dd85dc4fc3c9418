// LANES rows of bytes woven: what stands at one place in each of them lies side by side, four bytes or a half together.
//
// Rows are woven once, as they are loaded, or each time before they are read. Then a vector has a lane for each row.
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
INLINED inline void columns_of_16(Lines in, ivec *out) {
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
  columns_of_16(in, out);
  columns_of_16(in.at(16), out + 4);
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

// LANES rows of a file, woven: a row's byte b stands at LANES * b, or beside those that belong to it.
struct Woven {
  const byte *first;

  Woven at(int64_t bytes) const { return {first + LANES * bytes}; }
};

INLINED inline ivec fours(Woven in) { return (ivec)load(reinterpret_cast<const float *>(in.first)); }

template <int N>
INLINED inline void columns(Woven in, ivec *out) {
  UNROLLED for (int i = 0; i < N; i++) out[i] = fours(in.at(4 * i));
}

INLINED inline vec halves(Woven in) { return Float16::part(in.first, 0, 0, {}); }

// Single bytes or halves of each row.
template <int SIZE>
inline void weave_some(Lines in, byte *to) {
  for (int l = 0; l < LANES; l++) std::memcpy(to + l * SIZE, in.first + l * in.row, SIZE);
}

// Weaves blocks of F of LANES rows.
template <typename F>
void weave(Lines in, int64_t blocks, byte *to) {
  const auto put = [&](const ivec *columns, int count) INLINED {
    for (int i = 0; i < count; i++, to += 4 * LANES) store(reinterpret_cast<float *>(to), (vec)columns[i]);
  };
  for (; blocks > 0; blocks--, in = in.at(F::BYTES)) {
    constexpr int END = F::BYTES - F::LAST;
    if constexpr (F::FIRST > 0) weave_some<F::FIRST>(in, to);
    to += LANES * F::FIRST;
    int at = F::FIRST;
    ivec found[8];
    for (; at + 32 <= END; at += 32, put(found, 8)) columns_of_32(in.at(at), found);
    for (; at + 16 <= END; at += 16, put(found, 4)) columns_of_16(in.at(at), found);
    for (; at < END; at += 4, put(found, 1)) found[0] = fours(in.at(at));
    if constexpr (F::LAST > 0) weave_some<F::LAST>(in.at(END), to);
    to += LANES * F::LAST;
  }
}

}  // namespace
