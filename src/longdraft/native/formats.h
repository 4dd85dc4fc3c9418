// The formats of stored weights: how a block is unpacked to bytes and scales.
//
// A block is that of one row, or those of LANES rows that are woven (stored.h). Woven, a vector holds four weights of each
// output: products with four numbers of x are one operation for all outputs, a block's scale is one vector, and no sum is ever
// gathered from lanes. So each output's blocks are added in their order on every processor.
//
// A format says how many weights and bytes a block has, which of its first and last bytes are no part of four, and how block()
// unpacks one into pieces of 32 weights. It calls use(piece, w, scale, least) for each: w(i) gives weights 4i to 4i + 3 of each
// row, i < COLUMNS_OF_PIECE. The floats that they stand for are exact or rounded once, as gguf's own.
//   PIECES  pieces that x is rounded in together (products.h): in blocks of 256, where scales of woven pieces are whole numbers
//           times a float of the block, four of them; the last that use() is called for is the last of the four
//   WIDE    sums of their products, times those whole numbers, need more bits than a float has
//   SCALES  scales of a piece: one for all 32 weights, or one for each 16
//   LEAST   a weight is scale * byte + least; else scale * (byte - ZERO)
//   MOST    the largest byte
//   LISTED  w's bytes, 15 at most, are places in LIST
//   nth(i)  the piece that the i-th call of use() is for
#pragma once

#include "kernels.h"
#include "stored.h"

namespace {

using std::int64_t;

constexpr int PIECE = 32, PARTS = PIECE / LANES;
constexpr int COLUMNS_OF_PIECE = 8;  // vectors of four weights an output

template <int W, int B, int S, int F = 0, int L = 0>
struct InOrder {
  static constexpr int WEIGHTS = W, BYTES = B, SCALES = S, FIRST = F, LAST = L, PIECES = W == 256 ? 4 : 1;
  static constexpr bool LISTED = false, WIDE = false;
  static constexpr int nth(int i) { return i; }
};

template <typename I>
INLINED inline I low_nibbles(I x) { return x & 0x0f0f0f0f; }

template <typename I>
INLINED inline I high_nibbles(I x) { return x >> 4 & 0x0f0f0f0f; }

// Bits of x where the mask has ones, those of y elsewhere.
template <typename I>
INLINED inline I joined(I x, I y, std::int32_t mask) { return (x & mask) | (y & ~mask); }

// Column i of a piece whose 16 bytes are four columns: the low nibbles are its first 16 weights, the high ones the others.
template <typename Columns>
INLINED inline auto nibble(const Columns &bytes, int i) { return i < 4 ? low_nibbles(bytes[i]) : high_nibbles(bytes[i - 4]); }
template <typename Columns>
INLINED inline wide nibble(const Columns &bytes, Whole i) { return bytes[i] >> wide{0, 0, 0, 0, 4, 4, 4, 4} & 0x0f0f0f0f; }

// Bits 4i to 4i + 3 of each lane, one in each byte, as its bit 4: a fifth bit beside nibbles.
INLINED inline ivec fifths(ivec bits, int i) {
#if defined(__AVX512F__)
  // Looked up by the lowest four bits: whole-number products are slow.
  const ivec number = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, spread = number * 0x02040810 & 0x10101010;
  return (ivec)_mm512_permutexvar_epi32((__m512i)(bits >> (4 * i)), (__m512i)spread);
#else
  return (bits >> (4 * i) & 15) * 0x02040810 & 0x10101010;
#endif
}
INLINED inline wide fifths(std::int32_t bits, Whole) {
  return (bits >> wide{0, 4, 8, 12, 16, 20, 24, 28} & 15) * 0x02040810 & 0x10101010;
}

// Q4_0, or with a fifth bit Q5_0.
template <int BITS>
struct Centred : InOrder<32, 2 + 4 * BITS, 1, 2> {
  static constexpr int MOST = (1 << BITS) - 1, ZERO = 1 << (BITS - 1);
  static constexpr bool LEAST = false;
  template <typename In, typename Use>
  INLINED static void block(In in, const Use &use) {
    const auto bytes = columns<4>(in.at(4 * BITS - 14));
    const auto bits = in.at(2).four();
    const auto scale = in.half();
    use(0, [&](auto i) { return BITS == 5 ? nibble(bytes, i) | fifths(bits, i) : nibble(bytes, i); }, &scale, nullptr);
  }
};

// Q4_1, or with a fifth bit Q5_1.
template <int BITS>
struct Shifted : InOrder<32, 4 + 4 * BITS, 1> {
  static constexpr int MOST = (1 << BITS) - 1, ZERO = 0;
  static constexpr bool LEAST = true;
  template <typename In, typename Use>
  INLINED static void block(In in, const Use &use) {
    const auto bytes = columns<4>(in.at(4 * BITS - 12));
    const auto ends = in.four(), bits = in.at(4).four();
    const auto scale = halves(ends), least = halves(ends >> 16);
    use(0, [&](auto i) { return BITS == 5 ? nibble(bytes, i) | fifths(bits, i) : nibble(bytes, i); }, &scale, &least);
  }
};

struct Q8_0 : InOrder<32, 34, 1, 2> {
  static constexpr int MOST = 255, ZERO = 128;
  static constexpr bool LEAST = false;
  template <typename In, typename Use>
  INLINED static void block(In in, const Use &use) {
    const auto bytes = columns<8>(in.at(2));
    const auto scale = in.half();
    use(0, [&](auto i) { return bytes[i] ^ static_cast<std::int32_t>(0x80808080); }, &scale, nullptr);
  }
};

// What nibbles stand for in formats that list the values: each with ZERO added, which makes it a byte.
struct OfIQ4 {
  static constexpr int ZERO = 128, MOST = 241;
  static constexpr bool LEAST = false, LISTED = true;
  static constexpr byte LIST[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
};
struct OfMXFP4 {  // twice the values
  static constexpr int ZERO = 12, MOST = 24;
  static constexpr bool LEAST = false, LISTED = true;
  static constexpr byte LIST[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
};

struct IQ4_NL : InOrder<32, 18, 1, 2>, OfIQ4 {
  using OfIQ4::LISTED;
  template <typename In, typename Use>
  INLINED static void block(In in, const Use &use) {
    const auto bytes = columns<4>(in.at(2));
    const auto scale = in.half();
    use(0, [&](auto i) { return nibble(bytes, i); }, &scale, nullptr);
  }
};

struct MXFP4 : InOrder<32, 17, 1, 1>, OfMXFP4 {
  using OfMXFP4::LISTED;
  template <typename In, typename Use>
  INLINED static void block(In in, const Use &use) {
    const auto bytes = columns<4>(in.at(1));
    // Half of 2^(e - 127), the smallest two of which are no normal floats.
    const auto e = in.one(), least = ((e & 1) << 21) + (1 << 21);
    const auto scale = with_bits(e < 2 ? least : (e - 1) << 23);
    use(0, [&](auto i) { return nibble(bytes, i); }, &scale, nullptr);
  }
};

// A scale: a block's float times a whole number.
struct Scale {
  vec whole;
  ivec number;

  INLINED operator vec() const { return whole * floats(number); }
};
INLINED inline Scale scaled(vec whole, ivec number) { return {whole, number}; }
INLINED inline vec scaled(vec whole, std::int32_t number) { return whole * floats(number); }

// Floats times bytes less a number, four bytes in each of N columns.
template <int N, int LESS = 0>
struct Scales {
  vec scale;
  ivec bytes[N];

  INLINED Scale operator[](int i) const { return {scale, (bytes[i / 4] >> (i % 4 * 8) & 255) - LESS}; }
};

template <int N, int LESS = 0>
struct RowScales {
  float all[16];

  INLINED RowScales(vec scale, std::int32_t a, std::int32_t b, std::int32_t c = 0, std::int32_t d = 0) {
    const wide columns{a, b, c, d};
    byte bytes[32];
    std::memcpy(bytes, &columns, sizeof bytes);
    for (int i = 0; i < 4 * N; i += LANES) store(all + i, floats(unsigned_bytes(bytes + i) - LESS) * scale);
  }
  INLINED vec operator[](int i) const { return every(all[i]); }
};

template <int LESS = 0, typename... Columns>
INLINED inline auto scales(vec scale, Columns... columns) {
  constexpr int N = sizeof...(columns);
  if constexpr ((std::is_same_v<Columns, ivec> && ...)) {
    return Scales<N, LESS>{scale, {columns...}};
  } else {
    return RowScales<N, LESS>(scale, columns...);
  }
}

struct Q2_K : InOrder<256, 84, 2> {
  static constexpr int MOST = 3, ZERO = 0, PIECES = 1;  // no tile has room for two least values of a piece
  static constexpr bool LEAST = true;
  template <typename In, typename Use>
  INLINED static void block(In in, const Use &use) {
    const auto a = in.four(), b = in.at(4).four(), c = in.at(8).four(), d = in.at(12).four(), ends = in.at(80).four();
    const auto scale = scales(halves(ends), low_nibbles(a), low_nibbles(b), low_nibbles(c), low_nibbles(d));
    const auto least = scales(-halves(ends >> 16), high_nibbles(a), high_nibbles(b), high_nibbles(c), high_nibbles(d));
    for (int side = 0; side < 2; side++) {
      const auto bytes = columns<8>(in.at(16 + side * 32));
      for (int turn = 0; turn < 4; turn++) {
        const int piece = 4 * side + turn;
        const decltype(scale[0]) own[] = {scale[2 * piece], scale[2 * piece + 1]};
        const vec leasts[] = {least[2 * piece], least[2 * piece + 1]};
        use(piece, [&](auto i) { return bytes[i] >> (turn * 2) & 0x03030303; }, own, leasts);
      }
    }
  }
};

struct Q3_K : InOrder<256, 110, 2, 0, 2> {
  static constexpr int MOST = 7, ZERO = 4;
  static constexpr bool LEAST = false;
  template <typename In, typename Use>
  INLINED static void block(In in, const Use &use) {
    const auto high = columns<8>(in);
    const auto a = in.at(96).four(), b = in.at(100).four(), upper = in.at(104).four();
    const auto with = [&](auto low, int turn) { return low | (upper >> (2 * turn) & 0x03030303) << 4; };
    const auto scale = scales<32>(in.at(108).half(), with(low_nibbles(a), 0), with(low_nibbles(b), 1),
                                  with(high_nibbles(a), 2), with(high_nibbles(b), 3));
    for (int side = 0; side < 2; side++) {
      const auto bytes = columns<8>(in.at(32 + side * 32));
      for (int turn = 0; turn < 4; turn++) {
        const int piece = 4 * side + turn;
        const decltype(scale[0]) own[] = {scale[2 * piece], scale[2 * piece + 1]};
        const auto w = [&](auto i) { return (bytes[i] >> (turn * 2) & 0x03030303) | (high[i] >> piece & 0x01010101) << 2; };
        use(piece, w, own, nullptr);
      }
    }
  }
};

// Q4_K, or with a fifth bit Q5_K.
template <int BITS>
struct SixBitScales : InOrder<256, 16 + 32 * BITS, 1> {
  static constexpr int MOST = (1 << BITS) - 1, ZERO = 0;
  static constexpr bool LEAST = true, WIDE = BITS == 5;
  template <typename In, typename Use>
  INLINED static void block(In in, const Use &use) {
    // Scales and least values of pieces, six bits each. Of the last four pieces the lower bits lie in the last column, the upper
    // two in those of the first four.
    const auto ends = in.four(), a = in.at(4).four(), b = in.at(8).four(), last = in.at(12).four();
    const auto scale = scales(halves(ends), a & 0x3f3f3f3f, low_nibbles(last) | (a >> 2 & 0x30303030));
    const auto least = scales(-halves(ends >> 16), b & 0x3f3f3f3f, high_nibbles(last) | (b >> 2 & 0x30303030));
    auto high = columns<8>(in.at(16));
    for (int pair = 0; pair < 4; pair++) {
      const auto bytes = columns<8>(in.at(32 * BITS - 112 + 32 * pair));
      UNROLLED for (int upper = 0; upper < 2; upper++) {
        const auto w = [&](auto i) {
          if constexpr (BITS == 4) return upper ? high_nibbles(bytes[i]) : low_nibbles(bytes[i]);
          return joined(upper ? bytes[i] >> 4 : bytes[i], high[i] << (4 - upper), 0x0f0f0f0f) & 0x1f1f1f1f;
        };
        const auto own = scale[2 * pair + upper];
        const vec own_least = least[2 * pair + upper];
        use(2 * pair + upper, w, &own, &own_least);
      }
      if constexpr (BITS == 5) high.drop(2);
    }
  }
};

struct Q6_K : InOrder<256, 210, 2, 0, 2> {
  static constexpr int MOST = 63, ZERO = 32;
  static constexpr bool LEAST = false, WIDE = true;
  static constexpr int nth(int i) { return (i & 4) | (i & 1) << 1 | (i & 2) >> 1; }
  template <typename In, typename Use>
  INLINED static void block(In in, const Use &use) {
    const auto number = [&](int i) { return in.at(192 + 4 * i).four() ^ static_cast<std::int32_t>(0x80808080); };  // signed
    const auto scale = scales<128>(in.at(208).half(), number(0), number(1), number(2), number(3));
    // Piece 4 side + t takes nibbles t / 2 of 32 bytes, the first or the second of the side, and bits 2t of the high ones.
    for (int side = 0; side < 2; side++) {
      const auto high = columns<8>(in.at(128 + 32 * side));
      UNROLLED for (int half = 0; half < 2; half++) {
        const auto low = columns<8>(in.at(64 * side + 32 * half));
        UNROLLED for (int upper = 0; upper < 2; upper++) {
          const int piece = 4 * side + 2 * upper + half;
          const decltype(scale[0]) own[] = {scale[2 * piece], scale[2 * piece + 1]};
          const auto w = [&](auto i) {
            const auto bits = upper ? high[i] >> (2 * half) : high[i] << (4 - 2 * half);
            return joined(upper ? low[i] >> 4 : low[i], bits, 0x0f0f0f0f) & 0x3f3f3f3f;
          };
          use(piece, w, own, nullptr);
        }
      }
    }
  }
};

struct IQ4_XS : InOrder<256, 136, 1>, OfIQ4 {
  static constexpr bool WIDE = true;
  using OfIQ4::LISTED;
  template <typename In, typename Use>
  INLINED static void block(In in, const Use &use) {
    const auto ends = in.four(), low = in.at(4).four();
    const auto scale = halves(ends);
    for (int piece = 0; piece < 8; piece++) {
      const auto bytes = columns<4>(in.at(8 + 16 * piece));
      const auto s = (low >> (4 * piece) & 15) | (ends >> (16 + 2 * piece) & 3) << 4;
      const auto own = scaled(scale, s - 32);
      use(piece, [&](auto i) { return nibble(bytes, i); }, &own, nullptr);
    }
  }
};

// what(F{}) for the format F of a matrix in blocks.
template <typename What>
inline void in_blocks(Format format, const What &what) {
  switch (format) {
    case Format::Q4_0: return what(Centred<4>{});
    case Format::Q5_0: return what(Centred<5>{});
    case Format::Q4_1: return what(Shifted<4>{});
    case Format::Q5_1: return what(Shifted<5>{});
    case Format::Q8_0: return what(Q8_0{});
    case Format::Q2_K: return what(Q2_K{});
    case Format::Q3_K: return what(Q3_K{});
    case Format::Q4_K: return what(SixBitScales<4>{});
    case Format::Q5_K: return what(SixBitScales<5>{});
    case Format::Q6_K: return what(Q6_K{});
    case Format::IQ4_NL: return what(IQ4_NL{});
    case Format::IQ4_XS: return what(IQ4_XS{});
    case Format::MXFP4: return what(MXFP4{});
    default: return;
  }
}

}  // namespace
