// The primitives of isa.h with AVX-512: 16 lanes.
#include <immintrin.h>

typedef float vec __attribute__((vector_size(64)));
typedef std::int32_t ivec __attribute__((vector_size(64)));
constexpr int MAX_SUMS = 24;

static inline vec fmadd(vec a, vec b, vec c) { return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }

static inline __m128i load_16_bytes(const void *p) { return _mm_loadu_si128(static_cast<const __m128i *>(p)); }
static inline __m256i load_16_shorts(const void *p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
static inline ivec load_u8(const void *p) { return (ivec)_mm512_cvtepu8_epi32(load_16_bytes(p)); }
static inline ivec load_i8(const void *p) { return (ivec)_mm512_cvtepi8_epi32(load_16_bytes(p)); }
static inline ivec load_u16(const void *p) { return (ivec)_mm512_cvtepu16_epi32(load_16_shorts(p)); }
static inline vec load_fp16(const void *p) { return (vec)_mm512_cvtph_ps(load_16_shorts(p)); }
static inline void store_i8(std::int8_t *p, ivec x) { _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtepi32_epi8((__m512i)x)); }

ALWAYS_INLINE inline vec fp16_to_float(ivec x) { return (vec)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)x)); }
ALWAYS_INLINE inline vec broadcast_fp16(std::uint16_t bits) { return (vec)_mm512_cvtph_ps(_mm256_set1_epi16(static_cast<short>(bits))); }

static inline int32x8 lookup16(const byte *table, int32x8 x) {
  return (int32x8)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load_16_bytes(table)), (__m256i)x);
}
static inline ivec lookup16(const byte *table, ivec x) {
  return (ivec)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load_16_bytes(table)), (__m512i)x);
}

ALWAYS_INLINE inline ivec spread_bits(ivec x) {
  // Looks the product of neon.h up by the lowest 4 bits, because vpmulld is slow.
  const ivec index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, spread = index * 0x02040810 & 0x10101010;
  return (ivec)_mm512_permutexvar_epi32((__m512i)x, (__m512i)spread);
}

ALWAYS_INLINE inline vec load_quarters(const byte *rows, std::int64_t stride) {
  const auto load_two = [=](const byte *p) ALWAYS_INLINE {
    return _mm256_loadu2_m128i(reinterpret_cast<const __m128i *>(p + 4 * stride), reinterpret_cast<const __m128i *>(p));
  };
  return (vec)_mm512_inserti64x4(_mm512_castsi256_si512(load_two(rows)), load_two(rows + 8 * stride), 1);
}

#if defined(__AVX512VNNI__)
constexpr int DOT4_MAX_CODE = 255;

// Four activations as one number. It may alias, because the activations are written as bytes.
typedef std::int32_t aliasing_int32 __attribute__((may_alias));

template <int MAX_CODE> static inline ivec dot4_accumulate(ivec sum, ivec w, const std::int8_t *x4) {
  static_assert(MAX_CODE <= DOT4_MAX_CODE);
  // In assembly, for its embedded broadcast: compilers would broadcast by a separate instruction, which takes a third longer.
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*reinterpret_cast<const aliasing_int32 *>(x4)));
  return sum;
}
#else
constexpr int DOT4_MAX_CODE = 127;  // vpmaddubsw saturates for larger codes

typedef std::int16_t svec __attribute__((vector_size(64)));

static inline svec pair_products(ivec w, ivec x) { return (svec)_mm512_maddubs_epi16((__m512i)w, (__m512i)x); }
static inline ivec sum_pairs(svec pairs, svec factors) { return (ivec)_mm512_madd_epi16((__m512i)pairs, (__m512i)factors); }

template <int MAX_CODE> static inline ivec dot4_accumulate(ivec sum, ivec w, const std::int8_t *x4) {
  std::int32_t x4_bits;
  std::memcpy(&x4_bits, x4, sizeof x4_bits);
  __m512i a = (__m512i)w, b = _mm512_set1_epi32(x4_bits);
  if constexpr (MAX_CODE > DOT4_MAX_CODE) {
    a = _mm512_xor_si512(a, _mm512_set1_epi8(-128));
    b = _mm512_mask_sub_epi8(b, _mm512_movepi8_mask(a), _mm512_setzero_si512(), b);
    a = _mm512_abs_epi8(a);
  }
  return sum + sum_pairs(pair_products((ivec)a, (ivec)b), svec{} + std::int16_t{1});
}
#endif
