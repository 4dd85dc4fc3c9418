// GGUF's blocks of 256 weights, whose pieces have scales of a few bits each: see stored.h.
//
// A block is opened once: its scales become floats in a few vectors, and weights whose bits are in several places become bytes,
// 32 at a time. So a piece costs little more than a block of 32.
#pragma once

#include "stored.h"

#include <cstdint>

// 32 bytes, whatever a vector's size.
typedef std::int32_t wide __attribute__((vector_size(32)));
typedef std::int8_t wide_bytes __attribute__((vector_size(32)));
typedef std::uint64_t two_words __attribute__((vector_size(16)));

static inline wide wide_of(const byte *p) {
  wide x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

static inline void put(byte *p, wide x) { std::memcpy(p, &x, sizeof x); }

static inline std::uint64_t long_word(const byte *p) {
  std::uint64_t x;
  std::memcpy(&x, p, 8);
  return x;
}

// Bits moved up, or down where the number is negative.
static inline wide moved(wide x, int up) { return up < 0 ? x >> -up : x << up; }

// Each byte less a number.
static inline wide less(wide x, int number) { return (wide)((wide_bytes)x - static_cast<std::int8_t>(number)); }

// A block with a byte for each weight.
template <int SCALES, int LEAST>
struct alignas(64) Opened {
  float scale[SCALES + LEAST];
  byte q[256];
};

// The scales and least values of Q4_K and Q5_K, six bits each, in fours: scales, least values with their sign turned, then
// four more of each.
static inline void open_sixes(const byte *block, float *to) {
  constexpr std::uint64_t LOW = 0x0f0f0f0f0f0f0f0f, SIX = 0x3f3f3f3f3f3f3f3f, TOP = 0x3030303030303030;
  const std::uint64_t first = long_word(block + 4), last = word(block + 12);
  const two_words packed = {first & SIX, ((last | last << 28) & LOW) | (first >> 2 & TOP)};
  byte bytes[16];
  std::memcpy(bytes, &packed, sizeof bytes);
  const float d = half(block), least = -half(block + 2);
  for (int i = 0; i < 16; i += LANES) {
    const ivec own = LANES == 4 ? every(i & 4) : lane_bits() & 0xf0f0;
    store(to + i, floats(unsigned_bytes(bytes + i)) * (own != 0 ? every(least) : every(d)));
  }
}

// Where a piece's scale is among those; its least value comes four later.
static inline int six_of(int piece) { return piece + piece / 4 * 4; }

struct Q4_K {
  static constexpr int WEIGHTS = 256, BYTES = 144;
  typedef Nibbles Scale;
  typedef Opened<8, 8> Block;
  static void open(const byte *block, Block &to) {
    constexpr std::int32_t KEPT = LANES == 16 ? -1 : 0x0f0f0f0f;  // the lookup takes the lowest bits by itself
    open_sixes(block, to.scale);
    UNROLLED for (int pair = 0; pair < 4; pair++) {
      const wide x = wide_of(block + 16 + 32 * pair);
      put(to.q + 64 * pair, x & KEPT);
      put(to.q + 64 * pair + 32, x >> 4 & KEPT);
    }
  }
  static Scale scale(const Block &block, int piece) {
    const float *s = block.scale + six_of(piece);
    return Nibbles(s[0], s[4]);
  }
  static vec part(const Block &block, int piece, int part, const Scale &s) {
    return s.low(unsigned_bytes(block.q + piece * PIECE + part * LANES));
  }
};

struct Q5_K {
  static constexpr int WEIGHTS = 256, BYTES = 176;
  struct Scale {
    float scale, least;
  };
  typedef Opened<8, 8> Block;
  static void open(const byte *block, Block &to) {
    open_sixes(block, to.scale);
    const wide high = wide_of(block + 16);
    UNROLLED for (int piece = 0; piece < 8; piece++) {
      const wide low = wide_of(block + 48 + piece / 2 * 32) >> (piece % 2 * 4) & 0x0f0f0f0f;
      put(to.q + piece * PIECE, low | (moved(high, 4 - piece) & 0x10101010));
    }
  }
  static Scale scale(const Block &block, int piece) {
    const float *s = block.scale + six_of(piece);
    return {s[0], s[4]};
  }
  static vec part(const Block &block, int piece, int part, const Scale &s) {
    return floats(unsigned_bytes(block.q + piece * PIECE + part * LANES)) * s.scale + s.least;
  }
};

// A scale for each 16 weights, which are signed bytes.
struct Halves {
  typedef Opened<16, 0> Block;
  struct Scale {
    float of[2];
  };
  static constexpr int WEIGHTS = 256;
  static Scale scale(const Block &block, int piece) { return {{block.scale[2 * piece], block.scale[2 * piece + 1]}}; }
  static vec part(const Block &block, int piece, int part, const Scale &s) {
    return floats(signed_bytes(block.q + piece * PIECE + part * LANES)) * s.of[2 * part / PARTS];
  }
};

struct Q6_K : Halves {
  static constexpr int BYTES = 210;
  static void open(const byte *block, Block &to) {
    const float d = half(block + 208);
    for (int i = 0; i < 16; i += LANES) store(to.scale + i, floats(signed_bytes(block + 192 + i)) * d);
    UNROLLED for (int piece = 0; piece < 8; piece++) {
      const int side = piece / 4, turn = piece % 4;
      const wide low = wide_of(block + side * 64 + turn % 2 * 32) >> (turn / 2 * 4) & 0x0f0f0f0f;
      const wide high = moved(wide_of(block + 128 + side * 32), 4 - 2 * turn) & 0x30303030;
      put(to.q + piece * PIECE, less(low | high, 32));
    }
  }
};

struct Q3_K : Halves {
  static constexpr int BYTES = 110;
  static void open(const byte *block, Block &to) {
    // Four bits of a scale in eight bytes, two in four.
    constexpr std::uint64_t LOW = 0x0f0f0f0f0f0f0f0f, TWO = 0x0303030303030303;
    const std::uint64_t low = long_word(block + 96), last = word(block + 104), high = last | last >> 2 << 32;
    const two_words packed = {(low & LOW) | (high & TWO) << 4, (low >> 4 & LOW) | (high >> 4 & TWO) << 4};
    byte bytes[16];
    std::memcpy(bytes, &packed, sizeof bytes);
    const float d = half(block + 108);
    for (int i = 0; i < 16; i += LANES) store(to.scale + i, floats(unsigned_bytes(bytes + i) - 32) * d);
    const wide third = wide_of(block);
    UNROLLED for (int piece = 0; piece < 8; piece++) {
      const wide two = wide_of(block + 32 + piece / 4 * 32) >> (piece % 4 * 2) & 0x03030303;
      put(to.q + piece * PIECE, less(two | (moved(third, 2 - piece) & 0x04040404), 4));
    }
  }
};

struct Q2_K {
  static constexpr int WEIGHTS = 256, BYTES = 84;
  typedef Opened<16, 16> Block;
  struct Scale {
    float of[2], least[2];
  };
  static void open(const byte *block, Block &to) {
    const float d = half(block + 80), least = -half(block + 82);
    for (int i = 0; i < 16; i += LANES) {
      const ivec both = unsigned_bytes(block + i);
      store(to.scale + i, floats(both & 15) * d);
      store(to.scale + 16 + i, floats(both >> 4) * least);
    }
    UNROLLED for (int piece = 0; piece < 8; piece++) {
      put(to.q + piece * PIECE, wide_of(block + 16 + piece / 4 * 32) >> (piece % 4 * 2) & 0x03030303);
    }
  }
  static Scale scale(const Block &block, int piece) {
    const float *s = block.scale + 2 * piece;
    return {{s[0], s[1]}, {s[16], s[17]}};
  }
  static vec part(const Block &block, int piece, int part, const Scale &s) {
    const int side = 2 * part / PARTS;
    return floats(unsigned_bytes(block.q + piece * PIECE + part * LANES)) * s.of[side] + s.least[side];
  }
};

struct IQ4_XS : Plain {
  static constexpr int WEIGHTS = 256, BYTES = 136;
  typedef Listed<OfIQ4> Scale;
  static Scale scale(Block block, int piece) {
    const std::uint32_t low = word(block + 4) >> (4 * piece) & 15, high = word(block) >> (16 + 2 * piece) & 3;
    return Scale(half(block) * static_cast<float>(static_cast<int>(low | high << 4) - 32));
  }
  static vec part(Block block, int piece, int part, const Scale &s) { return nibbles(block + 8 + 16 * piece, part, s); }
};
