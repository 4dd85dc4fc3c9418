// Stored weights (GGUF's blocks, bfloat16 and float16), unpacked to floats in registers.
//
// A format defines the weights and bytes of a block, and unpacks LANES weights at a time: open() does the work once for each
// block, `Scale` is what the 32 weights of a piece share, and part() returns the floats. Each float has the same bits as gguf's
// own dequantisation. Blocks of 256 weights are in stored_k.h.
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

// The same for five bits: thirty-two values.
struct Fives {
#if defined(__AVX512F__)
  vec first, second;
  Fives() = default;
  Fives(float scale, float least) {
    const vec steps = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    first = steps * scale + least;
    second = (steps + 16) * scale + least;
  }
  vec of(ivec x) const { return (vec)_mm512_permutex2var_ps((__m512)first, (__m512i)x, (__m512)second); }
#else
  float scale, least;
  Fives() = default;
  Fives(float scale, float least) : scale(scale), least(least) {}
  vec of(ivec x) const { return floats(x) * scale + least; }
#endif
};

// What nibbles stand for in formats that list the values: each with a number added that makes it a byte.
struct OfIQ4 {
  static constexpr int ZERO = 128, MOST = 241;
  static constexpr byte LIST[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
};
struct OfMXFP4 {  // twice the values
  static constexpr int ZERO = 12, MOST = 24;
  static constexpr byte LIST[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
};

// Each byte of x, 15 at most, replaced by what stands at its place in a table of sixteen.
static inline ivec looked_up(const byte *table, ivec x) {
#if defined(__AVX512BW__)
  const __m128i found = _mm_loadu_si128(reinterpret_cast<const __m128i *>(table));
  return (ivec)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(found), (__m512i)x);
#elif defined(__AVX2__)
  const __m128i found = _mm_loadu_si128(reinterpret_cast<const __m128i *>(table));
  return (ivec)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(found), (__m256i)x);
#elif defined(__aarch64__)
  return (ivec)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)x);
#else
  byte bytes[4 * LANES];
  std::memcpy(bytes, &x, sizeof bytes);
  for (byte &b : bytes) b = table[b];
  std::memcpy(&x, bytes, sizeof bytes);
  return x;
#endif
}

// The floats for nibbles whose values are listed: scale * value.
template <typename Of>
struct Listed {
#if defined(__AVX512F__)
  vec values;
  Listed() = default;
  explicit Listed(float scale) { values = floats(unsigned_bytes(Of::LIST) - Of::ZERO) * scale; }
  vec low(ivec x) const { return (vec)_mm512_permutexvar_ps((__m512i)x, (__m512)values); }
  vec high(ivec x) const { return low(x >> 4); }
#else
  float scale;
  Listed() = default;
  explicit Listed(float scale) : scale(scale) {}
  vec of(ivec x) const { return floats((looked_up(Of::LIST, x) & 255) - Of::ZERO) * scale; }
  vec low(ivec x) const { return of(x & 15); }
  vec high(ivec x) const { return of(x >> 4); }
#endif
};

// The low nibbles of 16 bytes, then the high ones.
template <typename Values>
static inline vec nibbles(const byte *p, int part, const Values &s) {
  constexpr int HALF = PARTS / 2;
  return part < HALF ? s.low(unsigned_bytes(p + part * LANES)) : s.high(unsigned_bytes(p + (part - HALF) * LANES));
}

// A bit for each lane, from the lowest on.
static inline ivec lane_bits() {
#if defined(__AVX512F__)
  return ivec{1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
#elif defined(__AVX__)
  return ivec{1, 2, 4, 8, 16, 32, 64, 128};
#else
  return ivec{1, 2, 4, 8};
#endif
}

// The same as numbers of five bits, the fifth ones being `bits`, one for each weight.
static inline ivec fives(const byte *p, int part, std::uint32_t bits) {
  constexpr int HALF = PARTS / 2;
  const ivec x = part < HALF ? unsigned_bytes(p + part * LANES) & 15 : unsigned_bytes(p + (part - HALF) * LANES) >> 4;
  const ivec own = every(static_cast<std::int32_t>(bits >> (part * LANES))) & lane_bits();
  return x | ((own != 0) & 16);
}

// A format without work that is done once for each block.
struct Plain {
  typedef const byte *Block;
  static void open(const byte *block, Block &to) { to = block; }
};

struct Q4_0 : Plain {
  static constexpr int WEIGHTS = 32, BYTES = 18;
  typedef Nibbles Scale;
  static Scale scale(Block block, int) {
    const float d = half(block);
    return Nibbles(d, -8 * d);
  }
  static vec part(Block block, int, int part, const Scale &s) { return nibbles(block + 2, part, s); }
};

struct Q4_1 : Plain {
  static constexpr int WEIGHTS = 32, BYTES = 20;
  typedef Nibbles Scale;
  static Scale scale(Block block, int) { return Nibbles(half(block), half(block + 2)); }
  static vec part(Block block, int, int part, const Scale &s) { return nibbles(block + 4, part, s); }
};

struct Q8_0 : Plain {
  static constexpr int WEIGHTS = 32, BYTES = 34;
  typedef float Scale;
  static Scale scale(Block block, int) { return half(block); }
  static vec part(Block block, int, int part, const Scale &s) {
    return floats(signed_bytes(block + 2 + part * LANES)) * s;
  }
};

static inline std::uint32_t word(const byte *p) {
  std::uint32_t x;
  std::memcpy(&x, p, 4);
  return x;
}

struct Q5_0 : Plain {
  static constexpr int WEIGHTS = 32, BYTES = 22;
  typedef Fives Scale;
  static Scale scale(Block block, int) {
    const float d = half(block);
    return Fives(d, -16 * d);
  }
  static vec part(Block block, int, int part, const Scale &s) { return s.of(fives(block + 6, part, word(block + 2))); }
};

struct Q5_1 : Plain {
  static constexpr int WEIGHTS = 32, BYTES = 24;
  typedef Fives Scale;
  static Scale scale(Block block, int) { return Fives(half(block), half(block + 2)); }
  static vec part(Block block, int, int part, const Scale &s) { return s.of(fives(block + 8, part, word(block + 4))); }
};

struct IQ4_NL : Plain {
  static constexpr int WEIGHTS = 32, BYTES = 18;
  typedef Listed<OfIQ4> Scale;
  static Scale scale(Block block, int) { return Scale(half(block)); }
  static vec part(Block block, int, int part, const Scale &s) { return nibbles(block + 2, part, s); }
};

struct MXFP4 : Plain {
  static constexpr int WEIGHTS = 32, BYTES = 17;
  typedef Listed<OfMXFP4> Scale;
  static Scale scale(Block block, int) {
    // Half of 2^(e - 127), the smallest two of which are no normal floats.
    const std::uint32_t e = *block, bits = e < 2 ? 0x00200000u << e : (e - 1) << 23;
    float d;
    std::memcpy(&d, &bits, 4);
    return Scale(d);
  }
  static vec part(Block block, int, int part, const Scale &s) { return nibbles(block + 1, part, s); }
};

struct Bfloat16 : Plain {
  static constexpr int WEIGHTS = 32, BYTES = 64;
  struct Scale {};
  static Scale scale(Block, int) { return {}; }
  static vec part(Block block, int, int part, const Scale &) {
    const ivec bits = shorts(block + 2 * part * LANES) << 16;
    vec x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  }
};

struct Float16 : Plain {
  static constexpr int WEIGHTS = 32, BYTES = 64;
  struct Scale {};
  static Scale scale(Block, int) { return {}; }
  static vec part(Block block, int, int part, const Scale &) {
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
