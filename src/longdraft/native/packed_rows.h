// Loads 8- and 16-bit numbers as vectors, and reads the bytes of quantized rows: of a single row, or of LANES interleaved rows.
//
// Interleaved rows alternate in units of 4 bytes, so that unit i of all rows is one vector with a lane for each row. With LANES = 4:
//     row 0: a0 a1 a2 ...   -->   a0 b0 c0 d0  a1 b1 c1 d1  a2 b2 c2 d2 ...
//     row 1: b0 b1 b2 ...         '-vector 0-' '-vector 1-' '-vector 2-'
// Units are smaller where a block's length requires it: 2 bytes for a float16 at its begin or end, 1 byte for an exponent (quants.h).
#pragma once

#include "vectors.h"

typedef std::uint8_t byte;

// For functions that keep unpacked weights in registers, which a call would spill to memory.
#define ALWAYS_INLINE __attribute__((always_inline))

struct BFloat16 {
  std::uint16_t bits;
};

struct Float16 {
  std::uint16_t bits;
};

// Load LANES numbers and widen them to 32 bits. By intrinsics, because compilers would convert vectors of bytes element by element.
#if defined(__AVX512F__)
static inline __m128i load_16_bytes(const void *p) { return _mm_loadu_si128(static_cast<const __m128i *>(p)); }
static inline __m256i load_16_shorts(const void *p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
static inline ivec load_u8(const byte *p) { return (ivec)_mm512_cvtepu8_epi32(load_16_bytes(p)); }
static inline ivec load_i8(const void *p) { return (ivec)_mm512_cvtepi8_epi32(load_16_bytes(p)); }
static inline ivec load_u16(const void *p) { return (ivec)_mm512_cvtepu16_epi32(load_16_shorts(p)); }
static inline vec load(const Float16 *p) { return (vec)_mm512_cvtph_ps(load_16_shorts(p)); }
#elif defined(__AVX2__)
static inline __m128i load_8_bytes(const void *p) { return _mm_loadl_epi64(static_cast<const __m128i *>(p)); }
static inline __m128i load_8_shorts(const void *p) { return _mm_loadu_si128(static_cast<const __m128i *>(p)); }
static inline ivec load_u8(const byte *p) { return (ivec)_mm256_cvtepu8_epi32(load_8_bytes(p)); }
static inline ivec load_i8(const void *p) { return (ivec)_mm256_cvtepi8_epi32(load_8_bytes(p)); }
static inline ivec load_u16(const void *p) { return (ivec)_mm256_cvtepu16_epi32(load_8_shorts(p)); }
static inline vec load(const Float16 *p) { return (vec)_mm256_cvtph_ps(load_8_shorts(p)); }
#else
static inline uint8x8_t load_4_bytes(const void *p) {
  std::uint32_t bytes;
  std::memcpy(&bytes, p, 4);
  return vcreate_u8(bytes);
}
static inline uint16x4_t load_4_shorts(const void *p) { return vreinterpret_u16_u8(vld1_u8(static_cast<const byte *>(p))); }
static inline ivec load_u8(const byte *p) { return (ivec)vmovl_u16(vget_low_u16(vmovl_u8(load_4_bytes(p)))); }
static inline ivec load_i8(const void *p) { return (ivec)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(load_4_bytes(p))))); }
static inline ivec load_u16(const void *p) { return (ivec)vmovl_u16(load_4_shorts(p)); }
static inline vec load(const Float16 *p) { return (vec)vcvt_f32_f16(vreinterpret_f16_u16(load_4_shorts(p))); }
#endif

static inline vec to_float(ivec x) { return __builtin_convertvector(x, vec); }
static inline vec to_float(std::int32_t x) { return broadcast(static_cast<float>(x)); }

static inline vec load(const BFloat16 *p) { return (vec)(load_u16(p) << 16); }
static inline vec load(const std::int8_t *p) { return to_float(load_i8(p)); }

static inline vec float_from_bits(ivec bits) { return (vec)bits; }
static inline vec float_from_bits(std::int32_t bits) { return (vec)broadcast(bits); }

static inline float load_scalar(const float *p) { return *p; }
static inline float load_scalar(const std::int8_t *p) { return *p; }
static inline float load_scalar(const BFloat16 *p) {
  const std::uint32_t bits = static_cast<std::uint32_t>(p->bits) << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Converts the float16 in the lower 16 bits of each lane to float32.
ALWAYS_INLINE inline vec fp16_to_float(ivec x) {
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

// Broadcasts a float16, as float32.
ALWAYS_INLINE inline vec broadcast_fp16(std::uint16_t bits) {
#if defined(__AVX512F__)
  return (vec)_mm512_cvtph_ps(_mm256_set1_epi16(static_cast<short>(bits)));
#elif defined(__AVX2__)
  return (vec)_mm256_cvtph_ps(_mm_set1_epi16(static_cast<short>(bits)));
#else
  return (vec)vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(bits)));
#endif
}
ALWAYS_INLINE inline vec fp16_to_float(std::int32_t x) { return broadcast_fp16(static_cast<std::uint16_t>(x)); }

// Vectors of 32 bytes on every instruction set, for a sub-block of a single row.
typedef std::int32_t int32x8 __attribute__((vector_size(32)));
typedef byte uint8x32 __attribute__((vector_size(32)));

// Looks up each byte of x, at most 15, in a table of 16 bytes (pshufb, tbl).
#if defined(__AVX2__)
static inline int32x8 lookup16(const byte *table, int32x8 x) {
  const __m128i table_vector = _mm_loadu_si128(reinterpret_cast<const __m128i *>(table));
  return (int32x8)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table_vector), (__m256i)x);
}
#if defined(__AVX512F__)
static inline ivec lookup16(const byte *table, ivec x) {
  return (ivec)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load_16_bytes(table)), (__m512i)x);
}
#endif
#else
static inline ivec lookup16(const byte *table, ivec x) { return (ivec)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)x); }
static inline int32x8 lookup16(const byte *table, int32x8 x) {
  ivec halves[2];
  std::memcpy(halves, &x, sizeof x);
  for (ivec &part : halves) part = lookup16(table, part);
  std::memcpy(&x, halves, sizeof x);
  return x;
}
#endif

// The index that selects all columns of a single row at once (RowColumns).
struct AllColumns {};

// A position in the bytes of one quantized row. u8(), u32() and fp16() read a number there.
struct SingleRow {
  typedef std::int32_t Int;
  const byte *ptr;

  SingleRow advance(std::int64_t bytes) const { return {ptr + bytes}; }
  Int u8() const { return *ptr; }
  Int u32() const {
    Int x;
    std::memcpy(&x, ptr, sizeof x);
    return x;
  }
  vec fp16() const {
    std::uint16_t bits;
    std::memcpy(&bits, ptr, sizeof bits);
    return broadcast_fp16(bits);
  }
};

// A position in LANES interleaved rows; u8(), u32() and fp16() read a number of each row. advance() counts the bytes of one row.
struct InterleavedRows {
  typedef ivec Int;
  const byte *ptr;

  InterleavedRows advance(std::int64_t bytes) const { return {ptr + LANES * bytes}; }
  Int u8() const { return load_u8(ptr); }
  Int u32() const { return (ivec)load(reinterpret_cast<const float *>(ptr)); }
  vec fp16() const { return load(reinterpret_cast<const Float16 *>(ptr)); }
};

// N consecutive columns of a block. A column is 4 bytes, so mostly 4 codes, of each row.
template <int N>
struct InterleavedColumns {
  ivec col[N];

  ALWAYS_INLINE explicit InterleavedColumns(InterleavedRows in) {
    UNROLL for (int i = 0; i < N; i++) col[i] = in.advance(4 * i).u32();
  }
  ALWAYS_INLINE ivec operator[](int i) const { return col[i]; }
  ALWAYS_INLINE void shift_right(int bits) {
    UNROLL for (int i = 0; i < N; i++) col[i] >>= bits;
  }
};

// N columns of a single row, 4 or 8.
template <int N>
struct RowColumns {
  int32x8 bytes;  // 8 columns, or 4 columns twice

  ALWAYS_INLINE explicit RowColumns(SingleRow in) {
    constexpr int SIZE = N == 8 ? 32 : 16;
    UNROLL for (int i = 0; i < 32; i += SIZE) std::memcpy(reinterpret_cast<byte *>(&bytes) + i, in.ptr, SIZE);
  }
  ALWAYS_INLINE std::int32_t operator[](int i) const { return bytes[i]; }
  ALWAYS_INLINE int32x8 operator[](AllColumns) const { return bytes; }
  ALWAYS_INLINE void shift_right(int bits) { bytes >>= bits; }
};

// Loads N columns.
template <int N> ALWAYS_INLINE inline InterleavedColumns<N> columns(InterleavedRows in) { return InterleavedColumns<N>(in); }
template <int N> ALWAYS_INLINE inline RowColumns<N> columns(SingleRow in) { return RowColumns<N>(in); }

// Loads a vector with 16 bytes from each of LANES / 4 rows: rows 0, 4, 8 and 12 with AVX-512, 0 and 4 with AVX2, 0 with NEON.
ALWAYS_INLINE inline vec load_quarters(const byte *rows, std::int64_t w_stride) {
#if defined(__AVX2__)
  const auto load_two = [=](const byte *p) ALWAYS_INLINE {
    return _mm256_loadu2_m128i(reinterpret_cast<const __m128i *>(p + 4 * w_stride), reinterpret_cast<const __m128i *>(p));
  };
#if defined(__AVX512F__)
  return (vec)_mm512_inserti64x4(_mm512_castsi256_si512(load_two(rows)), load_two(rows + 8 * w_stride), 1);
#else
  return (vec)load_two(rows);
#endif
#else
  return load(reinterpret_cast<const float *>(rows));
#endif
}

// Takes elements FIRST and FIRST + 1 from each 128-bit part of a and of b: in the order a b a b if GROUP is 1, and a a b b if it is 2.
template <int FIRST, int GROUP, int... I>
ALWAYS_INLINE inline vec interleave_quarters(vec a, vec b, std::integer_sequence<int, I...>) {
  return shuffle<(I / 4 * 4 + FIRST + (GROUP == 1 ? I % 4 / 2 : I % 2) + (GROUP == 1 ? I % 2 : I % 4 / 2) * LANES)...>(a, b);
}

// Interleaves 16 bytes (4 columns) of LANES rows, by 4 x 4 transposes of 32-bit units.
ALWAYS_INLINE inline void repack_16(const byte *rows, std::int64_t w_stride, byte *to) {
  constexpr auto ALL = std::make_integer_sequence<int, LANES>{};
  vec a[4], b[4];
  UNROLL for (int i = 0; i < 4; i++) a[i] = load_quarters(rows + i * w_stride, w_stride);
  UNROLL for (int i = 0; i < 2; i++) {
    b[i] = interleave_quarters<0, 1>(a[2 * i], a[2 * i + 1], ALL);
    b[i + 2] = interleave_quarters<2, 1>(a[2 * i], a[2 * i + 1], ALL);
  }
  UNROLL for (int i = 0; i < 2; i++) {
    store(reinterpret_cast<float *>(to) + 2 * i * LANES, interleave_quarters<0, 2>(b[2 * i], b[2 * i + 1], ALL));
    store(reinterpret_cast<float *>(to) + (2 * i + 1) * LANES, interleave_quarters<2, 2>(b[2 * i], b[2 * i + 1], ALL));
  }
}

// Interleaves LANES rows of n_blocks quant blocks of format F (quants.h). The first HEAD_BYTES of a block are one unit, and so are its last
// TAIL_BYTES.
template <typename F> void repack(const byte *rows, std::int64_t w_stride, std::int64_t n_blocks, byte *to) {
  const auto copy_units = [&](std::int64_t offset, auto size) ALWAYS_INLINE {
    for (int l = 0; l < LANES; l++, to += size.value) std::memcpy(to, rows + l * w_stride + offset, size.value);
  };
  std::int64_t bytes = F::BYTES;
  if constexpr (F::HEAD_BYTES + F::TAIL_BYTES == 0) bytes *= std::exchange(n_blocks, 1);  // the row is like one long block
  for (; n_blocks > 0; n_blocks--, rows += bytes) {
    std::int64_t offset = F::HEAD_BYTES, end = bytes - F::TAIL_BYTES;
    if constexpr (F::HEAD_BYTES > 0) copy_units(0, std::integral_constant<int, F::HEAD_BYTES>{});
    for (; offset + 16 <= end; offset += 16, to += 16 * LANES) repack_16(rows + offset, w_stride, to);
    for (; offset < end; offset += 4) copy_units(offset, std::integral_constant<int, 4>{});
    if constexpr (F::TAIL_BYTES > 0) copy_units(end, std::integral_constant<int, F::TAIL_BYTES>{});
  }
}
