// Stored blocks as bytes, for int8 arithmetic: the weights of LANES outputs beside one another, and their scales.
//
// Of LANES rows of W that are woven (transposed.h), a vector holds four weights of each output: products with four numbers of x
// are one operation for all outputs, a block's scale is one vector, and no sum is ever gathered from lanes. So each output's
// blocks are added in their order on every processor.
//
// A format says how many weights and bytes a block has, which of its first and last bytes are no part of four, and how block()
// unpacks one into pieces of 32 weights. It calls use(piece, w, scale, least) for each: w(i) gives weights 4i to 4i + 3 of each
// output, i < COLUMNS_OF_PIECE.
//   SCALES  scales of a piece: one for all 32 weights, or one for each 16
//   LEAST   a weight is scale * byte + least; else scale * (byte - ZERO)
//   MOST    the largest byte
//   nth(i)  the piece that the i-th call of use() is for
#pragma once

#include "stored.h"
#include "transposed.h"
#include "vectors.h"

#include <cstdint>

namespace {

using std::int64_t;

constexpr int COLUMNS_OF_PIECE = 8;  // vectors of four weights an output

template <int W, int S, int F = 0, int L = 0>
struct InOrder {
  static constexpr int WEIGHTS = W, SCALES = S, FIRST = F, LAST = L;
  static constexpr int nth(int i) { return i; }
};

INLINED inline ivec low_nibbles(ivec x) { return x & 0x0f0f0f0f; }

INLINED inline ivec high_nibbles(ivec x) { return x >> 4 & 0x0f0f0f0f; }

// Bits of x where the mask has ones, those of y elsewhere.
INLINED inline ivec joined(ivec x, ivec y, std::int32_t mask) { return (x & mask) | (y & ~mask); }

// Column i of a piece whose 16 bytes are four columns: the low nibbles are its first 16 weights, the high ones the others.
INLINED inline ivec nibble(const ivec *bytes, int i) { return i < 4 ? low_nibbles(bytes[i]) : high_nibbles(bytes[i - 4]); }

// Bits 4i to 4i + 3 of each lane, one in each byte, as its bit 4: a fifth bit beside nibbles.
INLINED inline ivec fifths(ivec bits, int i) {
#if defined(__AVX512F__)
  // Looked up by the lowest four bits: whole-number products are slow.
  constexpr int ONE = 0x10, TWO = ONE << 8, FOUR = ONE << 16, EIGHT = ONE << 24;
  const ivec spread = {0,     ONE,         TWO,         TWO | ONE,         FOUR,         FOUR | ONE,         FOUR | TWO,         FOUR | TWO | ONE,
                       EIGHT, EIGHT | ONE, EIGHT | TWO, EIGHT | TWO | ONE, EIGHT | FOUR, EIGHT | FOUR | ONE, EIGHT | FOUR | TWO, EIGHT | FOUR | TWO | ONE};
  return (ivec)_mm512_permutexvar_epi32((__m512i)(bits >> (4 * i)), (__m512i)spread);
#else
  return (bits >> (4 * i) & 15) * 0x02040810 & 0x10101010;
#endif
}

struct Int8Q4_0 : InOrder<32, 1, 2> {
  static constexpr int BYTES = 18, MOST = 15, ZERO = 8;
  static constexpr bool LEAST = false;
  template <typename Use>
  INLINED static void block(Woven in, const Use &use) {
    ivec bytes[4];
    columns<4>(in.at(2), bytes);
    const vec scale = halves(in);
    use(0, [&](int i) { return nibble(bytes, i); }, &scale, nullptr);
  }
};

struct Int8Q4_1 : InOrder<32, 1> {
  static constexpr int BYTES = 20, MOST = 15, ZERO = 0;
  static constexpr bool LEAST = true;
  template <typename Use>
  INLINED static void block(Woven in, const Use &use) {
    ivec bytes[4];
    columns<4>(in.at(4), bytes);
    const ivec ends = fours(in);
    const vec scale = halves(ends), least = halves(ends >> 16);
    use(0, [&](int i) { return nibble(bytes, i); }, &scale, &least);
  }
};

struct Int8Q5_0 : InOrder<32, 1, 2> {
  static constexpr int BYTES = 22, MOST = 31, ZERO = 16;
  static constexpr bool LEAST = false;
  template <typename Use>
  INLINED static void block(Woven in, const Use &use) {
    ivec bytes[4];
    columns<4>(in.at(6), bytes);
    const ivec bits = fours(in.at(2));
    const vec scale = halves(in);
    use(0, [&](int i) { return nibble(bytes, i) | fifths(bits, i); }, &scale, nullptr);
  }
};

struct Int8Q5_1 : InOrder<32, 1> {
  static constexpr int BYTES = 24, MOST = 31, ZERO = 0;
  static constexpr bool LEAST = true;
  template <typename Use>
  INLINED static void block(Woven in, const Use &use) {
    ivec bytes[4];
    columns<4>(in.at(8), bytes);
    const ivec ends = fours(in), bits = fours(in.at(4));
    const vec scale = halves(ends), least = halves(ends >> 16);
    use(0, [&](int i) { return nibble(bytes, i) | fifths(bits, i); }, &scale, &least);
  }
};

struct Int8Q8_0 : InOrder<32, 1, 2> {
  static constexpr int BYTES = 34, MOST = 255, ZERO = 128;
  static constexpr bool LEAST = false;
  template <typename Use>
  INLINED static void block(Woven in, const Use &use) {
    ivec bytes[8];
    columns<8>(in.at(2), bytes);
    const vec scale = halves(in);
    use(0, [&](int i) { return bytes[i] ^ static_cast<std::int32_t>(0x80808080); }, &scale, nullptr);
  }
};

struct Int8IQ4_NL : InOrder<32, 1, 2> {
  static constexpr int BYTES = 18, MOST = OfIQ4::MOST, ZERO = OfIQ4::ZERO;
  static constexpr bool LEAST = false;
  template <typename Use>
  INLINED static void block(Woven in, const Use &use) {
    ivec bytes[4];
    columns<4>(in.at(2), bytes);
    const vec scale = halves(in);
    use(0, [&](int i) { return looked_up(OfIQ4::LIST, nibble(bytes, i)); }, &scale, nullptr);
  }
};

struct Int8MXFP4 : InOrder<32, 1, 1> {
  static constexpr int BYTES = 17, MOST = OfMXFP4::MOST, ZERO = OfMXFP4::ZERO;
  static constexpr bool LEAST = false;
  template <typename Use>
  INLINED static void block(Woven in, const Use &use) {
    ivec bytes[4];
    columns<4>(in.at(1), bytes);
    // Half of 2^(e - 127), the smallest two of which are no normal floats.
    const ivec e = unsigned_bytes(in.first), bits = e < 2 ? every(0x00200000) << e : (e - 1) << 23;
    const vec scale = (vec)bits;
    use(0, [&](int i) { return looked_up(OfMXFP4::LIST, nibble(bytes, i)); }, &scale, nullptr);
  }
};

struct Int8Q2_K : InOrder<256, 2> {
  static constexpr int BYTES = 84, MOST = 3, ZERO = 0;
  static constexpr bool LEAST = true;
  template <typename Use>
  INLINED static void block(Woven in, const Use &use) {
    ivec sixteen[4], bytes[8];
    columns<4>(in, sixteen);
    const ivec ends = fours(in.at(80));
    const vec scale = halves(ends), least = -halves(ends >> 16);
    for (int piece = 0; piece < 8; piece++) {
      if (piece % 4 == 0) columns<8>(in.at(16 + piece * 8), bytes);
      vec scales[2], leasts[2];
      UNROLLED for (int s = 0; s < 2; s++) {
        const ivec both = sixteen[piece / 2] >> (piece % 2 * 16 + s * 8) & 255;
        scales[s] = scale * floats(both & 15);
        leasts[s] = least * floats(both >> 4);
      }
      use(piece, [&](int i) { return bytes[i] >> (piece % 4 * 2) & 0x03030303; }, scales, leasts);
    }
  }
};

struct Int8Q3_K : InOrder<256, 2, 0, 2> {
  static constexpr int BYTES = 110, MOST = 7, ZERO = 4;
  static constexpr bool LEAST = false;
  template <typename Use>
  INLINED static void block(Woven in, const Use &use) {
    ivec own[3], high[8], bytes[8];
    columns<3>(in.at(96), own);
    columns<8>(in, high);
    const vec scale = halves(in.at(108));
    ivec sixteen[4];
    UNROLLED for (int i = 0; i < 4; i++) {
      sixteen[i] = (own[i % 2] >> (i / 2 * 4) & 0x0f0f0f0f) | (own[2] >> (2 * i) & 0x03030303) << 4;
    }
    for (int piece = 0; piece < 8; piece++) {
      if (piece % 4 == 0) columns<8>(in.at(32 + piece * 8), bytes);
      vec scales[2];
      UNROLLED for (int s = 0; s < 2; s++) {
        scales[s] = scale * floats((sixteen[piece / 2] >> (piece % 2 * 16 + s * 8) & 255) - 32);
      }
      const auto w = [&](int i) {
        return (bytes[i] >> (piece % 4 * 2) & 0x03030303) | (high[i] >> piece & 0x01010101) << 2;
      };
      use(piece, w, scales, nullptr);
    }
  }
};

// Scales and least values of the pieces of Q4_K and Q5_K, six bits each, from a block's first 16 bytes.
struct SixBits {
  ivec packed[4];
  vec scale, least;

  INLINED explicit SixBits(Woven in) {
    columns<4>(in, packed);
    scale = halves(packed[0]);
    least = -halves(packed[0] >> 16);
    // Of the last four pieces the lower bits lie in the last column, the upper two in those of the first four.
    const ivec upper_scales = packed[1] >> 2 & 0x30303030, upper_least = packed[2] >> 2 & 0x30303030;
    packed[0] = low_nibbles(packed[3]) | upper_scales;
    packed[3] = high_nibbles(packed[3]) | upper_least;
  }

  INLINED vec scale_of(int piece) const {
    return scale * floats(packed[piece < 4 ? 1 : 0] >> (piece % 4 * 8) & 63);
  }

  INLINED vec least_of(int piece) const {
    return least * floats(packed[piece < 4 ? 2 : 3] >> (piece % 4 * 8) & 63);
  }
};

struct Int8Q4_K : InOrder<256, 1> {
  static constexpr int BYTES = 144, MOST = 15, ZERO = 0;
  static constexpr bool LEAST = true;
  template <typename Use>
  INLINED static void block(Woven in, const Use &use) {
    const SixBits ends(in);
    for (int pair = 0; pair < 4; pair++) {
      ivec bytes[8];
      columns<8>(in.at(16 + 32 * pair), bytes);
      const vec scale = ends.scale_of(2 * pair), least = ends.least_of(2 * pair);
      use(2 * pair, [&](int i) { return low_nibbles(bytes[i]); }, &scale, &least);
      const vec scale2 = ends.scale_of(2 * pair + 1), least2 = ends.least_of(2 * pair + 1);
      use(2 * pair + 1, [&](int i) { return high_nibbles(bytes[i]); }, &scale2, &least2);
    }
  }
};

struct Int8Q5_K : InOrder<256, 1> {
  static constexpr int BYTES = 176, MOST = 31, ZERO = 0;
  static constexpr bool LEAST = true;
  template <typename Use>
  INLINED static void block(Woven in, const Use &use) {
    const SixBits ends(in);
    ivec high[8], bytes[8];
    columns<8>(in.at(16), high);
    for (int pair = 0; pair < 4; pair++) {
      columns<8>(in.at(48 + 32 * pair), bytes);
      UNROLLED for (int upper = 0; upper < 2; upper++) {
        const auto w = [&](int i) {
          return joined(upper ? bytes[i] >> 4 : bytes[i], high[i] << (4 - upper), 0x0f0f0f0f) & 0x1f1f1f1f;
        };
        const vec scale = ends.scale_of(2 * pair + upper), least = ends.least_of(2 * pair + upper);
        use(2 * pair + upper, w, &scale, &least);
      }
      UNROLLED for (int i = 0; i < 8; i++) high[i] >>= 2;
    }
  }
};

struct Int8Q6_K {
  static constexpr int WEIGHTS = 256, SCALES = 2, FIRST = 0, LAST = 2, BYTES = 210, MOST = 63, ZERO = 32;
  static constexpr bool LEAST = false;
  static constexpr int nth(int i) { return (i & 4) | (i & 1) << 1 | (i & 2) >> 1; }
  template <typename Use>
  INLINED static void block(Woven in, const Use &use) {
    ivec sixteen[4];
    columns<4>(in.at(192), sixteen);
    const vec scale = halves(in.at(208));
    // Piece 4 side + t takes nibbles t / 2 of 32 bytes, the first or the second of the side, and bits 2t of the high ones.
    for (int side = 0; side < 2; side++) {
      ivec high[8];
      columns<8>(in.at(128 + 32 * side), high);
      UNROLLED for (int half = 0; half < 2; half++) {
        ivec low[8];
        columns<8>(in.at(64 * side + 32 * half), low);
        UNROLLED for (int upper = 0; upper < 2; upper++) {
          vec scales[2];
          UNROLLED for (int s = 0; s < 2; s++) {
            const ivec own = sixteen[2 * side + upper] << (24 - half * 16 - s * 8) >> 24;  // signed
            scales[s] = scale * floats(own);
          }
          const auto w = [&](int i) {
            const ivec bits = upper ? high[i] >> (2 * half) : high[i] << (4 - 2 * half);
            return joined(upper ? low[i] >> 4 : low[i], bits, 0x0f0f0f0f) & 0x3f3f3f3f;
          };
          use(4 * side + 2 * upper + half, w, scales, nullptr);
        }
      }
    }
  }
};

struct Int8IQ4_XS : InOrder<256, 1> {
  static constexpr int BYTES = 136, MOST = OfIQ4::MOST, ZERO = OfIQ4::ZERO;
  static constexpr bool LEAST = false;
  template <typename Use>
  INLINED static void block(Woven in, const Use &use) {
    const ivec ends = fours(in), low = fours(in.at(4));
    const vec scale = halves(ends);
    for (int piece = 0; piece < 8; piece++) {
      ivec bytes[4];
      columns<4>(in.at(8 + 16 * piece), bytes);
      const ivec s = (low >> (4 * piece) & 15) | (ends >> (16 + 2 * piece) & 3) << 4;
      const vec own = scale * floats(s - 32);
      use(piece, [&](int i) { return looked_up(OfIQ4::LIST, nibble(bytes, i)); }, &own, nullptr);
    }
  }
};

}  // namespace
