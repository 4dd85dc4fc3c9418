// Stored blocks as bytes, for int8 arithmetic: the weights of LANES outputs beside one another, and their scales.
//
// Rows of W lie one behind the other in a file. Read LANES rows at a time and transposed in registers, lane l holds four
// weights of output l: products with four numbers of x are one operation for all outputs, a block's scale is one vector,
// and no sum is ever gathered from lanes. So each output's blocks are added in their order on every processor.
//
// A format says how many weights and bytes a block has, and how block() unpacks one into pieces of 32 weights:
//   SCALES  scales of a piece: one for all 32 weights, or one for each 16
//   LEAST   a weight is scale * byte + least; else scale * (byte - ZERO)
//   MOST    the largest byte
#pragma once

#include "stored.h"
#include "vectors.h"

#include <cstdint>

namespace {

using std::int64_t;

constexpr int COLUMNS_OF_PIECE = 8;  // vectors of four weights an output

template <int SCALES, bool LEAST>
struct Piece {
  ivec w[COLUMNS_OF_PIECE];
  vec scale[SCALES];
  vec least[LEAST ? SCALES : 0];
};

// LANES rows of blocks: the first one, and bytes from one to the next.
struct Lines {
  const byte *first;
  int64_t row;

  Lines at(int64_t bytes) const { return {first + bytes, row}; }
};

// --- by instruction set ---

#if defined(__AVX512F__)
inline __m512i of_four_rows(const byte *p, int64_t step) {
  const auto chunk = [=](int64_t i) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p + i * step)); };
  const __m512i one = _mm512_inserti32x4(_mm512_castsi128_si512(chunk(0)), chunk(1), 1);
  return _mm512_inserti32x4(_mm512_inserti32x4(one, chunk(2), 2), chunk(3), 3);
}
#elif defined(__AVX2__)
inline __m256i of_two_rows(const byte *p, int64_t step) {
  const auto chunk = [=](int64_t i) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p + i * step)); };
  return _mm256_inserti128_si256(_mm256_castsi128_si256(chunk(0)), chunk(1), 1);
}
#endif

// The next 16 bytes of each row as four columns: lane l of out[i] holds bytes 4i to 4i + 3 of row l.
inline void columns(Lines in, ivec *out) {
#if defined(__AVX512F__)
  // Rows j, j + 4, j + 8 and j + 12 in one register: then four dwords by four rows are transposed within its quarters.
  const __m512i a = of_four_rows(in.first, 4 * in.row), b = of_four_rows(in.first + in.row, 4 * in.row);
  const __m512i c = of_four_rows(in.first + 2 * in.row, 4 * in.row), d = of_four_rows(in.first + 3 * in.row, 4 * in.row);
  const __m512i ab = _mm512_unpacklo_epi32(a, b), cd = _mm512_unpacklo_epi32(c, d);
  const __m512i ab2 = _mm512_unpackhi_epi32(a, b), cd2 = _mm512_unpackhi_epi32(c, d);
  out[0] = (ivec)_mm512_unpacklo_epi64(ab, cd);
  out[1] = (ivec)_mm512_unpackhi_epi64(ab, cd);
  out[2] = (ivec)_mm512_unpacklo_epi64(ab2, cd2);
  out[3] = (ivec)_mm512_unpackhi_epi64(ab2, cd2);
#elif defined(__AVX2__)
  const __m256i a = of_two_rows(in.first, 4 * in.row), b = of_two_rows(in.first + in.row, 4 * in.row);
  const __m256i c = of_two_rows(in.first + 2 * in.row, 4 * in.row), d = of_two_rows(in.first + 3 * in.row, 4 * in.row);
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

// The halves in the lower 16 bits of each lane, as floats.
inline vec halves(ivec x) {
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

// --- formats ---

inline ivec low_nibbles(ivec x) { return x & 0x0f0f0f0f; }

inline ivec high_nibbles(ivec x) { return x >> 4 & 0x0f0f0f0f; }

// 16 bytes a row: the low nibbles are a piece's first 16 weights, the high ones the others.
inline void nibbles(Lines in, ivec *w) {
  ivec bytes[4];
  columns(in, bytes);
  UNROLLED for (int i = 0; i < 4; i++) {
    w[i] = low_nibbles(bytes[i]);
    w[4 + i] = high_nibbles(bytes[i]);
  }
}

// Bits 4i to 4i + 3 of each lane, one in each byte, as its bit 4: a fifth bit beside nibbles.
inline ivec fifths(ivec bits, int i) { return (bits >> (4 * i) & 15) * 0x02040810 & 0x10101010; }

// The first four bytes of each row's block. Blocks are 16 bytes long, or longer.
inline ivec begin(Lines in) {
  ivec found[4];
  columns(in, found);
  return found[0];
}

// `count` blocks of each row, by F::block() for one of them.
template <typename F>
struct Blocks {
  template <typename P>
  static void unpack(Lines in, int64_t count, P *to) {
    for (; count > 0; count--, in = in.at(F::BYTES), to += F::WEIGHTS / PIECE) F::block(in, to);
  }
};

template <typename F>
struct Of32 : Blocks<F> {
  static constexpr int WEIGHTS = 32, SCALES = 1;
};

template <typename F, int S>
struct Of256 : Blocks<F> {
  static constexpr int WEIGHTS = 256, SCALES = S;
};

struct Int8Q4_0 : Of32<Int8Q4_0> {
  static constexpr int BYTES = 18, MOST = 15, ZERO = 8;
  static constexpr bool LEAST = false;
  template <typename P>
  static void block(Lines in, P *to) {
    nibbles(in.at(2), to->w);
    to->scale[0] = halves(begin(in));
  }
};

struct Int8Q4_1 : Of32<Int8Q4_1> {
  static constexpr int BYTES = 20, MOST = 15, ZERO = 0;
  static constexpr bool LEAST = true;
  template <typename P>
  static void block(Lines in, P *to) {
    nibbles(in.at(4), to->w);
    const ivec ends = begin(in);
    to->scale[0] = halves(ends);
    to->least[0] = halves(ends >> 16);
  }
};

template <typename P>
inline void with_fifths(Lines in, ivec bits, P *to) {
  nibbles(in, to->w);
  UNROLLED for (int i = 0; i < COLUMNS_OF_PIECE; i++) to->w[i] |= fifths(bits, i);
}

struct Int8Q5_0 : Of32<Int8Q5_0> {
  static constexpr int BYTES = 22, MOST = 31, ZERO = 16;
  static constexpr bool LEAST = false;
  template <typename P>
  static void block(Lines in, P *to) {
    ivec ends[4];
    columns(in, ends);
    to->scale[0] = halves(ends[0]);
    with_fifths(in.at(6), (ends[0] >> 16 & 0xffff) | ends[1] << 16, to);
  }
};

struct Int8Q5_1 : Of32<Int8Q5_1> {
  static constexpr int BYTES = 24, MOST = 31, ZERO = 0;
  static constexpr bool LEAST = true;
  template <typename P>
  static void block(Lines in, P *to) {
    ivec ends[4];
    columns(in, ends);
    to->scale[0] = halves(ends[0]);
    to->least[0] = halves(ends[0] >> 16);
    with_fifths(in.at(8), ends[1], to);
  }
};

struct Int8Q8_0 : Of32<Int8Q8_0> {
  static constexpr int BYTES = 34, MOST = 255, ZERO = 128;
  static constexpr bool LEAST = false;
  template <typename P>
  static void block(Lines in, P *to) {
    columns(in.at(2), to->w);
    columns(in.at(18), to->w + 4);
    UNROLLED for (int i = 0; i < COLUMNS_OF_PIECE; i++) to->w[i] ^= static_cast<std::int32_t>(0x80808080);
    to->scale[0] = halves(begin(in));
  }
};

inline void listed(const byte *table, Lines in, ivec *w) {
  nibbles(in, w);
  UNROLLED for (int i = 0; i < COLUMNS_OF_PIECE; i++) w[i] = looked_up(table, w[i]);
}

struct Int8IQ4_NL : Of32<Int8IQ4_NL> {
  static constexpr int BYTES = 18, MOST = OfIQ4::MOST, ZERO = OfIQ4::ZERO;
  static constexpr bool LEAST = false;
  template <typename P>
  static void block(Lines in, P *to) {
    listed(OfIQ4::LIST, in.at(2), to->w);
    to->scale[0] = halves(begin(in));
  }
};

struct Int8MXFP4 : Of32<Int8MXFP4> {
  static constexpr int BYTES = 17, MOST = OfMXFP4::MOST, ZERO = OfMXFP4::ZERO;
  static constexpr bool LEAST = false;
  template <typename P>
  static void block(Lines in, P *to) {
    listed(OfMXFP4::LIST, in.at(1), to->w);
    // Half of 2^(e - 127), the smallest two of which are no normal floats.
    const ivec e = begin(in) & 255, bits = e < 2 ? every(0x00200000) << e : (e - 1) << 23;
    std::memcpy(&to->scale[0], &bits, sizeof bits);
  }
};

// The byte at place i of bytes that are four vectors.
inline ivec byte_of(const ivec *four, int i) { return four[i / 4] >> (i % 4 * 8) & 255; }

// 32 bytes of each row.
inline void columns_of_32(Lines in, ivec *out) {
  columns(in, out);
  columns(in.at(16), out + 4);
}

struct Int8Q2_K : Of256<Int8Q2_K, 2> {
  static constexpr int BYTES = 84, MOST = 3, ZERO = 0;
  static constexpr bool LEAST = true;
  template <typename P>
  static void block(Lines in, P *to) {
    ivec sixteen[4], ends[4], bytes[8];
    columns(in, sixteen);
    columns(in.at(68), ends);
    const vec scale = halves(ends[3]), least = -halves(ends[3] >> 16);
    for (int piece = 0; piece < 8; piece++, to++) {
      if (piece % 4 == 0) columns_of_32(in.at(16 + piece * 8), bytes);
      UNROLLED for (int i = 0; i < 8; i++) to->w[i] = bytes[i] >> (piece % 4 * 2) & 0x03030303;
      UNROLLED for (int s = 0; s < 2; s++) {
        const ivec both = byte_of(sixteen, 2 * piece + s);
        to->scale[s] = scale * floats(both & 15);
        to->least[s] = least * floats(both >> 4);
      }
    }
  }
};

struct Int8Q3_K : Of256<Int8Q3_K, 2> {
  static constexpr int BYTES = 110, MOST = 7, ZERO = 4;
  static constexpr bool LEAST = false;
  template <typename P>
  static void block(Lines in, P *to) {
    ivec packed[4], high[8], bytes[8];
    columns(in.at(94), packed);  // twelve bytes of scales, the block's own, and the last of the numbers before
    columns_of_32(in, high);
    const vec scale = halves(packed[3] >> 16);
    // Two bytes lie before the scales, so each four of them straddle two columns.
    ivec own[3], sixteen[4];
    for (int i = 0; i < 3; i++) own[i] = (packed[i] >> 16 & 0xffff) | packed[i + 1] << 16;
    for (int i = 0; i < 4; i++) {
      sixteen[i] = (own[i % 2] >> (i / 2 * 4) & 0x0f0f0f0f) | (own[2] >> (2 * i) & 0x03030303) << 4;
    }
    for (int piece = 0; piece < 8; piece++, to++) {
      if (piece % 4 == 0) columns_of_32(in.at(32 + piece * 8), bytes);
      UNROLLED for (int i = 0; i < 8; i++) {
        to->w[i] = (bytes[i] >> (piece % 4 * 2) & 0x03030303) | (high[i] >> piece & 0x01010101) << 2;
      }
      UNROLLED for (int s = 0; s < 2; s++) to->scale[s] = scale * floats(byte_of(sixteen, 2 * piece + s) - 32);
    }
  }
};

// Scales and least values of the pieces of Q4_K and Q5_K, six bits each, from a block's first 16 bytes.
struct SixBits {
  ivec packed[4];
  vec scale, least;

  explicit SixBits(Lines in) {
    columns(in, packed);
    scale = halves(packed[0]);
    least = -halves(packed[0] >> 16);
  }

  template <typename P>
  void of_piece(int piece, P &to) const {
    const int at = piece % 4 * 8;
    ivec s = packed[1] >> at & 63, l = packed[2] >> at & 63;
    if (piece >= 4) {
      s = (packed[3] >> at & 15) | (packed[1] >> (at + 6) & 3) << 4;
      l = (packed[3] >> (at + 4) & 15) | (packed[2] >> (at + 6) & 3) << 4;
    }
    to.scale[0] = scale * floats(s);
    to.least[0] = least * floats(l);
  }
};

struct Int8Q4_K : Of256<Int8Q4_K, 1> {
  static constexpr int BYTES = 144, MOST = 15, ZERO = 0;
  static constexpr bool LEAST = true;
  template <typename P>
  static void block(Lines in, P *to) {
    const SixBits ends(in);
    for (int pair = 0; pair < 4; pair++, to += 2) {
      ivec bytes[8];
      columns_of_32(in.at(16 + 32 * pair), bytes);
      UNROLLED for (int i = 0; i < 8; i++) {
        to[0].w[i] = low_nibbles(bytes[i]);
        to[1].w[i] = high_nibbles(bytes[i]);
      }
      ends.of_piece(2 * pair, to[0]);
      ends.of_piece(2 * pair + 1, to[1]);
    }
  }
};

struct Int8Q5_K : Of256<Int8Q5_K, 1> {
  static constexpr int BYTES = 176, MOST = 31, ZERO = 0;
  static constexpr bool LEAST = true;
  template <typename P>
  static void block(Lines in, P *to) {
    const SixBits ends(in);
    ivec high[8], bytes[8];
    columns_of_32(in.at(16), high);
    for (int piece = 0; piece < 8; piece++, to++) {
      if (piece % 2 == 0) columns_of_32(in.at(48 + 16 * piece), bytes);
      UNROLLED for (int i = 0; i < 8; i++) {
        to->w[i] = (bytes[i] >> (piece % 2 * 4) & 0x0f0f0f0f) | (high[i] >> piece & 0x01010101) << 4;
      }
      ends.of_piece(piece, *to);
    }
  }
};

struct Int8Q6_K : Of256<Int8Q6_K, 2> {
  static constexpr int BYTES = 210, MOST = 63, ZERO = 32;
  static constexpr bool LEAST = false;
  template <typename P>
  static void block(Lines in, P *to) {
    ivec sixteen[4], ends[4];
    columns(in.at(192), sixteen);
    columns(in.at(194), ends);
    const vec scale = halves(ends[3] >> 16);
    for (int side = 0; side < 2; side++) {
      ivec low[16], high[8];
      columns_of_32(in.at(64 * side), low);
      columns_of_32(in.at(64 * side + 32), low + 8);
      columns_of_32(in.at(128 + 32 * side), high);
      for (int turn = 0; turn < 4; turn++, to++) {
        UNROLLED for (int i = 0; i < 8; i++) {
          to->w[i] = (low[turn % 2 * 8 + i] >> (turn / 2 * 4) & 0x0f0f0f0f) | (high[i] >> (2 * turn) & 0x03030303) << 4;
        }
        UNROLLED for (int s = 0; s < 2; s++) {
          const ivec own = byte_of(sixteen, 8 * side + 2 * turn + s) << 24 >> 24;  // signed
          to->scale[s] = scale * floats(own);
        }
      }
    }
  }
};

struct Int8IQ4_XS : Of256<Int8IQ4_XS, 1> {
  static constexpr int BYTES = 136, MOST = OfIQ4::MOST, ZERO = OfIQ4::ZERO;
  static constexpr bool LEAST = false;
  template <typename P>
  static void block(Lines in, P *to) {
    ivec ends[4];
    columns(in, ends);
    const vec scale = halves(ends[0]);
    for (int piece = 0; piece < 8; piece++, to++) {
      listed(OfIQ4::LIST, in.at(8 + 16 * piece), to->w);
      const ivec s = (ends[1] >> (4 * piece) & 15) | (ends[0] >> (16 + 2 * piece) & 3) << 4;
      to->scale[0] = scale * floats(s - 32);
    }
  }
};

}  // namespace
