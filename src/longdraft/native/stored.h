// Numbers in eight or sixteen bits, as vectors and one by one; and rows of bytes, alone or woven together.
#pragma once

#include "vectors.h"

#include <cstdint>
#include <cstring>

typedef std::uint8_t byte;

// Unpacked values must stay in registers, which no function call preserves.
#define INLINED __attribute__((always_inline))

struct Brief {  // bfloat16
  std::uint16_t bits;
};

struct Half {  // float16
  std::uint16_t bits;
};

// LANES numbers of eight or sixteen bits, as whole numbers or floats. (Compilers convert such vectors one number at a time.)
#if defined(__AVX512F__)
static inline __m128i sixteen_bytes(const void *p) { return _mm_loadu_si128(static_cast<const __m128i *>(p)); }
static inline __m256i sixteen_shorts(const void *p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
static inline ivec unsigned_bytes(const byte *p) { return (ivec)_mm512_cvtepu8_epi32(sixteen_bytes(p)); }
static inline ivec signed_bytes(const void *p) { return (ivec)_mm512_cvtepi8_epi32(sixteen_bytes(p)); }
static inline ivec shorts(const void *p) { return (ivec)_mm512_cvtepu16_epi32(sixteen_shorts(p)); }
static inline vec load(const Half *p) { return (vec)_mm512_cvtph_ps(sixteen_shorts(p)); }
#elif defined(__AVX2__)
static inline __m128i eight_bytes(const void *p) { return _mm_loadl_epi64(static_cast<const __m128i *>(p)); }
static inline __m128i eight_shorts(const void *p) { return _mm_loadu_si128(static_cast<const __m128i *>(p)); }
static inline ivec unsigned_bytes(const byte *p) { return (ivec)_mm256_cvtepu8_epi32(eight_bytes(p)); }
static inline ivec signed_bytes(const void *p) { return (ivec)_mm256_cvtepi8_epi32(eight_bytes(p)); }
static inline ivec shorts(const void *p) { return (ivec)_mm256_cvtepu16_epi32(eight_shorts(p)); }
static inline vec load(const Half *p) { return (vec)_mm256_cvtph_ps(eight_shorts(p)); }
#else
static inline uint8x8_t four_bytes(const void *p) {
  std::uint32_t bytes;
  std::memcpy(&bytes, p, 4);
  return vcreate_u8(bytes);
}
static inline uint16x4_t four_shorts(const void *p) { return vreinterpret_u16_u8(vld1_u8(static_cast<const byte *>(p))); }
static inline ivec unsigned_bytes(const byte *p) { return (ivec)vmovl_u16(vget_low_u16(vmovl_u8(four_bytes(p)))); }
static inline ivec signed_bytes(const void *p) {
  return (ivec)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(four_bytes(p)))));
}
static inline ivec shorts(const void *p) { return (ivec)vmovl_u16(four_shorts(p)); }
static inline vec load(const Half *p) { return (vec)vcvt_f32_f16(vreinterpret_f16_u16(four_shorts(p))); }
#endif

static inline vec floats(ivec x) { return __builtin_convertvector(x, vec); }
static inline vec floats(std::int32_t x) { return every(static_cast<float>(x)); }

static inline vec load(const Brief *p) { return (vec)(shorts(p) << 16); }
static inline vec load(const std::int8_t *p) { return floats(signed_bytes(p)); }

static inline vec with_bits(ivec bits) { return (vec)bits; }
static inline vec with_bits(std::int32_t bits) { return (vec)every(bits); }

static inline float number(const float *p) { return *p; }
static inline float number(const std::int8_t *p) { return *p; }
static inline float number(const Brief *p) {
  const std::uint32_t bits = static_cast<std::uint32_t>(p->bits) << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
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
  return (vec)vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32((uint32x4_t)x)));
#endif
}

// A half in every lane.
INLINED inline vec every_half(std::uint16_t bits) {
#if defined(__AVX512F__)
  return (vec)_mm512_cvtph_ps(_mm256_set1_epi16(static_cast<short>(bits)));
#elif defined(__AVX2__)
  return (vec)_mm256_cvtph_ps(_mm_set1_epi16(static_cast<short>(bits)));
#else
  return (vec)vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(bits)));
#endif
}
INLINED inline vec halves(std::int32_t x) { return every_half(static_cast<std::uint16_t>(x)); }

// 32 bytes, whatever a vector's size.
typedef std::int32_t wide __attribute__((vector_size(32)));
typedef byte wide_bytes __attribute__((vector_size(32)));

// Each byte of x, 15 at most, replaced by what stands at its place in a table of sixteen.
#if defined(__AVX2__)
static inline wide looked_up(const byte *table, wide x) {
  const __m128i found = _mm_loadu_si128(reinterpret_cast<const __m128i *>(table));
  return (wide)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(found), (__m256i)x);
}
#if defined(__AVX512F__)
static inline ivec looked_up(const byte *table, ivec x) {
  return (ivec)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(sixteen_bytes(table)), (__m512i)x);
}
#endif
#else
static inline ivec looked_up(const byte *table, ivec x) { return (ivec)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)x); }
static inline wide looked_up(const byte *table, wide x) {
  ivec half[2];
  std::memcpy(half, &x, sizeof x);
  for (ivec &each : half) each = looked_up(table, each);
  std::memcpy(&x, half, sizeof x);
  return x;
}
#endif

// In the place of a column's number: all columns.
struct Whole {};

// A row of stored bytes.
struct Row {
  typedef std::int32_t Ints;
  const byte *first;

  Row at(std::int64_t bytes) const { return {first + bytes}; }
  Ints one() const { return *first; }
  Ints four() const {
    Ints x;
    std::memcpy(&x, first, sizeof x);
    return x;
  }
  vec half() const {
    std::uint16_t bits;
    std::memcpy(&bits, first, sizeof bits);
    return every_half(bits);
  }
};

// LANES of them woven, so that a vector has a lane for each: byte b of a row stands at LANES * b, or beside those that belong to
// it, four or two together.
struct Woven {
  typedef ivec Ints;
  const byte *first;

  Woven at(std::int64_t bytes) const { return {first + LANES * bytes}; }
  Ints one() const { return unsigned_bytes(first); }
  Ints four() const { return (ivec)load(reinterpret_cast<const float *>(first)); }
  vec half() const { return load(reinterpret_cast<const Half *>(first)); }
};

// The next N times four bytes.
template <int N>
struct Columns {
  ivec of[N];

  INLINED explicit Columns(Woven in) {
    UNROLLED for (int i = 0; i < N; i++) of[i] = in.at(4 * i).four();
  }
  INLINED ivec operator[](int i) const { return of[i]; }
  INLINED void drop(int bits) {
    UNROLLED for (int i = 0; i < N; i++) of[i] >>= bits;
  }
};

template <int N>
struct RowColumns {
  wide all;  // 16 bytes twice, or 32

  INLINED explicit RowColumns(Row in) {
    constexpr int SIZE = N == 8 ? 32 : 16;
    UNROLLED for (int i = 0; i < 32; i += SIZE) std::memcpy(reinterpret_cast<byte *>(&all) + i, in.first, SIZE);
  }
  INLINED std::int32_t operator[](int i) const { return all[i]; }
  INLINED wide operator[](Whole) const { return all; }
  INLINED void drop(int bits) { all >>= bits; }
};

template <int N>
INLINED inline Columns<N> columns(Woven in) { return Columns<N>(in); }
template <int N>
INLINED inline RowColumns<N> columns(Row in) { return RowColumns<N>(in); }

// 16 bytes of every fourth of LANES rows.
INLINED inline vec quarters(const byte *rows, std::int64_t w_row) {
#if defined(__AVX2__)
  const auto two = [=](const byte *p) INLINED {
    return _mm256_loadu2_m128i(reinterpret_cast<const __m128i *>(p + 4 * w_row), reinterpret_cast<const __m128i *>(p));
  };
#if defined(__AVX512F__)
  return (vec)_mm512_inserti64x4(_mm512_castsi256_si512(two(rows)), two(rows + 8 * w_row), 1);
#else
  return (vec)two(rows);
#endif
#else
  return load(reinterpret_cast<const float *>(rows));
#endif
}

// In each quarter: lanes FIRST and FIRST + 1 of a and b, in turn where EACH is 1, else a's before b's.
template <int FIRST, int EACH, int... I>
INLINED inline vec taken(vec a, vec b, std::integer_sequence<int, I...>) {
  return shuffled<(I / 4 * 4 + FIRST + (EACH == 1 ? I % 4 / 2 : I % 2) + (EACH == 1 ? I % 2 : I % 4 / 2) * LANES)...>(a, b);
}

// The next 16 bytes of LANES rows as four columns.
INLINED inline void weave_16(const byte *rows, std::int64_t w_row, byte *to) {
  constexpr auto ALL = std::make_integer_sequence<int, LANES>{};
  vec a[4], b[4];
  UNROLLED for (int i = 0; i < 4; i++) a[i] = quarters(rows + i * w_row, w_row);
  UNROLLED for (int i = 0; i < 2; i++) {
    b[i] = taken<0, 1>(a[2 * i], a[2 * i + 1], ALL);
    b[i + 2] = taken<2, 1>(a[2 * i], a[2 * i + 1], ALL);
  }
  UNROLLED for (int i = 0; i < 2; i++) {
    store(reinterpret_cast<float *>(to) + 2 * i * LANES, taken<0, 2>(b[2 * i], b[2 * i + 1], ALL));
    store(reinterpret_cast<float *>(to) + (2 * i + 1) * LANES, taken<2, 2>(b[2 * i], b[2 * i + 1], ALL));
  }
}

// Weaves LANES rows of blocks, whose FIRST and LAST bytes are no part of four.
template <typename F>
void weave(const byte *rows, std::int64_t w_row, std::int64_t blocks, byte *to) {
  const auto put = [&](std::int64_t at, auto size) INLINED {
    for (int l = 0; l < LANES; l++, to += size.value) std::memcpy(to, rows + l * w_row + at, size.value);
  };
  std::int64_t bytes = F::BYTES;
  if constexpr (F::FIRST + F::LAST == 0) bytes *= std::exchange(blocks, 1);
  for (; blocks > 0; blocks--, rows += bytes) {
    std::int64_t at = F::FIRST, end = bytes - F::LAST;
    if constexpr (F::FIRST > 0) put(0, std::integral_constant<int, F::FIRST>{});
    for (; at + 16 <= end; at += 16, to += 16 * LANES) weave_16(rows + at, w_row, to);
    for (; at < end; at += 4) put(at, std::integral_constant<int, 4>{});
    if constexpr (F::LAST > 0) put(end, std::integral_constant<int, F::LAST>{});
  }
}
