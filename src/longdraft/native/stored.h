// Weights as they are stored: GGUF's blocks, bfloat16 and float16, unpacked in registers to the floats that they stand for.
//
// A format says how many weights and bytes a block has, and unpacks a block's weights LANES at a time: `Scale` is what the
// 32 weights of a piece share, part() the floats. Each float is rounded as gguf's own dequantisation rounds it.
#pragma once

#include "vectors.h"

#include <cstdint>
#include <cstring>

typedef std::uint8_t byte;

constexpr int PIECE = 32, PARTS = PIECE / LANES;

// LANES numbers of eight or sixteen bits, as whole numbers. (Compilers convert such vectors one number at a time.)
#if defined(__AVX512F__)
static inline ivec unsigned_bytes(const byte *p) {
  return (ivec)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
}
static inline ivec signed_bytes(const byte *p) {
  return (ivec)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
}
static inline ivec shorts(const byte *p) {
  return (ivec)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}
#elif defined(__AVX2__)
static inline ivec unsigned_bytes(const byte *p) {
  return (ivec)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
}
static inline ivec signed_bytes(const byte *p) {
  return (ivec)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
}
static inline ivec shorts(const byte *p) {
  return (ivec)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
}
#elif defined(__aarch64__)
static inline uint8x8_t four(const byte *p) {
  std::uint32_t bytes;
  std::memcpy(&bytes, p, 4);
  return vcreate_u8(bytes);
}
static inline ivec unsigned_bytes(const byte *p) { return (ivec)vmovl_u16(vget_low_u16(vmovl_u8(four(p)))); }
static inline ivec signed_bytes(const byte *p) {
  return (ivec)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(four(p)))));
}
static inline ivec shorts(const byte *p) { return (ivec)vmovl_u16(vreinterpret_u16_u8(vld1_u8(p))); }
#else
template <typename From>
static inline ivec widened(const byte *p) {
  ivec x;
  for (int i = 0; i < LANES; i++) {
    From number;
    std::memcpy(&number, p + i * sizeof number, sizeof number);
    x[i] = number;
  }
  return x;
}
static inline ivec unsigned_bytes(const byte *p) { return widened<std::uint8_t>(p); }
static inline ivec signed_bytes(const byte *p) { return widened<std::int8_t>(p); }
static inline ivec shorts(const byte *p) { return widened<std::uint16_t>(p); }
#endif

static inline vec floats(ivec x) { return __builtin_convertvector(x, vec); }

static inline float half(const byte *p) {
  std::uint16_t h;
  std::memcpy(&h, p, 2);
#if defined(__F16C__)
  return _cvtsh_ss(h);
#elif defined(__aarch64__)
  __fp16 number;
  std::memcpy(&number, &h, 2);
  return number;
#else
  // Shifted into place, and 2^112 makes up for the other exponent; what has the largest one is infinite or NaN.
  std::uint32_t bits = static_cast<std::uint32_t>(h & 0x7fff) << 13, magic = (254u - 15u) << 23;
  float x, scale;
  std::memcpy(&x, &bits, 4);
  std::memcpy(&scale, &magic, 4);
  x *= scale;
  std::memcpy(&bits, &x, 4);
  if ((h & 0x7c00) == 0x7c00) bits |= 0x7f800000;
  bits |= static_cast<std::uint32_t>(h & 0x8000) << 16;
  std::memcpy(&x, &bits, 4);
  return x;
#endif
}

// The float for each of a nibble's sixteen values: scale * value + least, looked up sixteen at a time where the processor
// can, else computed.
struct Nibbles {
#if defined(__AVX512F__)
  vec values;
  Nibbles() = default;
  Nibbles(float scale, float least) {
    const vec steps = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    values = steps * scale + least;
  }
  // The lookup takes the lowest four bits of each number.
  vec low(ivec x) const { return (vec)_mm512_permutexvar_ps((__m512i)x, (__m512)values); }
  vec high(ivec x) const { return low(x >> 4); }
#else
  float scale, least;
  Nibbles() = default;
  Nibbles(float scale, float least) : scale(scale), least(least) {}
  vec low(ivec x) const { return floats(x & 15) * scale + least; }
  vec high(ivec x) const { return floats(x >> 4) * scale + least; }
#endif
};

// The low nibbles of 16 bytes, then the high ones.
static inline vec nibbles(const byte *p, int part, const Nibbles &s) {
  constexpr int HALF = PARTS / 2;
  return part < HALF ? s.low(unsigned_bytes(p + part * LANES)) : s.high(unsigned_bytes(p + (part - HALF) * LANES));
}

struct Q4_0 {
  static constexpr int WEIGHTS = 32, BYTES = 18;
  typedef Nibbles Scale;
  static Scale scale(const byte *block, int) {
    const float d = half(block);
    return Nibbles(d, -8 * d);
  }
  static vec part(const byte *block, int, int part, const Scale &s) { return nibbles(block + 2, part, s); }
};

struct Q4_1 {
  static constexpr int WEIGHTS = 32, BYTES = 20;
  typedef Nibbles Scale;
  static Scale scale(const byte *block, int) { return Nibbles(half(block), half(block + 2)); }
  static vec part(const byte *block, int, int part, const Scale &s) { return nibbles(block + 4, part, s); }
};

struct Q8_0 {
  static constexpr int WEIGHTS = 32, BYTES = 34;
  typedef float Scale;
  static Scale scale(const byte *block, int) { return half(block); }
  static vec part(const byte *block, int, int part, const Scale &s) {
    return floats(signed_bytes(block + 2 + part * LANES)) * s;
  }
};

// Scale and least value of a piece of a K block, six bits each.
struct Sixes {
  float scale, least;
};

static inline Sixes sixes(const byte *block, int piece) {
  const byte *s = block + 4;
  const int scale = piece < 4 ? s[piece] & 63 : (s[piece + 4] & 15) | (s[piece - 4] >> 6 << 4);
  const int least = piece < 4 ? s[piece + 4] & 63 : (s[piece + 4] >> 4) | (s[piece] >> 6 << 4);
  return {half(block) * scale, half(block + 2) * least};
}

struct Q4_K {
  static constexpr int WEIGHTS = 256, BYTES = 144;
  typedef Nibbles Scale;
  static Scale scale(const byte *block, int piece) {
    const Sixes s = sixes(block, piece);
    return Nibbles(s.scale, -s.least);
  }
  static vec part(const byte *block, int piece, int part, const Scale &s) {
    const ivec x = unsigned_bytes(block + 16 + piece / 2 * 32 + part * LANES);
    return piece % 2 ? s.high(x) : s.low(x);
  }
};

struct Q5_K {
  static constexpr int WEIGHTS = 256, BYTES = 176;
  typedef Sixes Scale;
  static Scale scale(const byte *block, int piece) { return sixes(block, piece); }
  static vec part(const byte *block, int piece, int part, const Scale &s) {
    const ivec low = unsigned_bytes(block + 48 + piece / 2 * 32 + part * LANES) >> (piece % 2 * 4);
    const ivec high = unsigned_bytes(block + 16 + part * LANES) >> piece;
    return floats((low & 15) | ((high & 1) << 4)) * s.scale - s.least;
  }
};

struct Q6_K {
  static constexpr int WEIGHTS = 256, BYTES = 210;
  struct Scale {
    float of[2];  // of a piece's two halves
  };
  static Scale scale(const byte *block, int piece) {
    const float d = half(block + 208);
    const auto at = [=](int i) { return d * static_cast<std::int8_t>(block[192 + 2 * piece + i]); };
    return {{at(0), at(1)}};
  }
  static vec part(const byte *block, int piece, int part, const Scale &s) {
    const int side = piece / 4, turn = piece % 4, at = part * LANES;
    const ivec low = unsigned_bytes(block + side * 64 + turn % 2 * 32 + at) >> (turn / 2 * 4);
    const ivec high = unsigned_bytes(block + 128 + side * 32 + at) >> (2 * turn);
    return floats(((low & 15) | ((high & 3) << 4)) - 32) * s.of[2 * part / PARTS];
  }
};

struct Bfloat16 {
  static constexpr int WEIGHTS = 32, BYTES = 64;
  struct Scale {};
  static Scale scale(const byte *, int) { return {}; }
  static vec part(const byte *block, int, int part, const Scale &) {
    const ivec bits = shorts(block + 2 * part * LANES) << 16;
    vec x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  }
};

struct Float16 {
  static constexpr int WEIGHTS = 32, BYTES = 64;
  struct Scale {};
  static Scale scale(const byte *, int) { return {}; }
  static vec part(const byte *block, int, int part, const Scale &) {
    const byte *p = block + 2 * part * LANES;
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
#elif defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
#elif defined(__aarch64__)
    return (vec)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));
#else
    vec x;
    for (int i = 0; i < LANES; i++) x[i] = half(p + 2 * i);
    return x;
#endif
  }
};
