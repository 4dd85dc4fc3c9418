// The primitives of isa.h with AVX2, FMA and F16C: 8 lanes.
#include <immintrin.h>

typedef float vec __attribute__((vector_size(32)));
typedef std::int32_t ivec __attribute__((vector_size(32)));
constexpr int MAX_SUMS = 12;

static inline vec fmadd(vec a, vec b, vec c) { return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }

static inline __m128i load_8_bytes(const void *p) { return _mm_loadl_epi64(static_cast<const __m128i *>(p)); }
static inline __m128i load_16_bytes(const void *p) { return _mm_loadu_si128(static_cast<const __m128i *>(p)); }
static inline ivec load_u8(const void *p) { return (ivec)_mm256_cvtepu8_epi32(load_8_bytes(p)); }
static inline ivec load_i8(const void *p) { return (ivec)_mm256_cvtepi8_epi32(load_8_bytes(p)); }
static inline ivec load_u16(const void *p) { return (ivec)_mm256_cvtepu16_epi32(load_16_bytes(p)); }
static inline vec load_fp16(const void *p) { return (vec)_mm256_cvtph_ps(load_16_bytes(p)); }
static inline void store_i8(std::int8_t *p, ivec x) {
  const __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i *>(p), _mm_packs_epi16(shorts, shorts));
}

ALWAYS_INLINE inline vec fp16_to_float(ivec x) {
  const __m256i low = _mm256_and_si256((__m256i)x, _mm256_set1_epi32(0xffff));
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x88);
  return (vec)_mm256_cvtph_ps(_mm256_castsi256_si128(packed));
}
ALWAYS_INLINE inline vec broadcast_fp16(std::uint16_t bits) { return (vec)_mm256_cvtph_ps(_mm_set1_epi16(static_cast<short>(bits))); }

static inline ivec lookup16(const byte *table, ivec x) {
  return (ivec)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load_16_bytes(table)), (__m256i)x);
}

ALWAYS_INLINE inline ivec spread_bits(ivec x) {
  return (x & 15) * 0x02040810 & 0x10101010;  // the product copies bit b to bit 4 of byte b, the mask drops all others
}

ALWAYS_INLINE inline vec load_quarters(const byte *rows, std::int64_t stride) {
  return (vec)_mm256_loadu2_m128i(reinterpret_cast<const __m128i *>(rows + 4 * stride), reinterpret_cast<const __m128i *>(rows));
}

#if defined(__AVXVNNI__)
constexpr int DOT4_MAX_CODE = 255;

template <int MAX_CODE> static inline ivec dot4_accumulate(ivec sum, ivec w, const std::int8_t *x4) {
  static_assert(MAX_CODE <= DOT4_MAX_CODE);
  std::int32_t x4_bits;
  std::memcpy(&x4_bits, x4, sizeof x4_bits);
  return (ivec)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, _mm256_set1_epi32(x4_bits));
}
#else
constexpr int DOT4_MAX_CODE = 127;  // vpmaddubsw saturates for larger codes

typedef std::int16_t svec __attribute__((vector_size(32)));

static inline svec pair_products(ivec w, ivec x) { return (svec)_mm256_maddubs_epi16((__m256i)w, (__m256i)x); }
static inline ivec sum_pairs(svec pairs, svec factors) { return (ivec)_mm256_madd_epi16((__m256i)pairs, (__m256i)factors); }

template <int MAX_CODE> static inline ivec dot4_accumulate(ivec sum, ivec w, const std::int8_t *x4) {
  std::int32_t x4_bits;
  std::memcpy(&x4_bits, x4, sizeof x4_bits);
  __m256i a = (__m256i)w, b = _mm256_set1_epi32(x4_bits);
  if constexpr (MAX_CODE > DOT4_MAX_CODE) {
    a = _mm256_xor_si256(a, _mm256_set1_epi8(-128));
    b = _mm256_sign_epi8(b, a);
    a = _mm256_abs_epi8(a);
  }
  return sum + sum_pairs(pair_products((ivec)a, (ivec)b), svec{} + std::int16_t{1});
}
#endif
