// Loads 8- and 16-bit numbers as vectors, and reads the bytes of quantized rows: of a single row, or of LANES interleaved rows.
//
// Interleaved rows alternate in units of 4 bytes, so that unit i of all rows is one vector with a lane for each row. With LANES = 4:
//     row 0: a0 a1 a2 ...   -->   a0 b0 c0 d0  a1 b1 c1 d1  a2 b2 c2 d2 ...
//     row 1: b0 b1 b2 ...         '-vector 0-' '-vector 1-' '-vector 2-'
// Units are smaller where a block's length requires it: 2 bytes for a float16 at its begin or end, 1 byte for an exponent (quants.h).
#pragma once

#include "vectors.h"

struct BFloat16 {
  std::uint16_t bits;
};

struct Float16 {
  std::uint16_t bits;
};

static inline vec to_float(ivec x) { return __builtin_convertvector(x, vec); }
static inline vec to_float(std::int32_t x) { return broadcast(static_cast<float>(x)); }

// Load LANES numbers.
static inline vec load(const Float16 *p) { return load_fp16(p); }
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

ALWAYS_INLINE inline vec fp16_to_float(std::int32_t x) { return broadcast_fp16(static_cast<std::uint16_t>(x)); }

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
