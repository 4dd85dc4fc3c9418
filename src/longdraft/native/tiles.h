// Tiles of a processor with AMX: 16 lines times 16 columns in one instruction, of bytes or of pairs of bfloat16.
#pragma once

#include "vectors.h"

#include <cstdint>

#if defined(LONGDRAFT_AMX)
constexpr bool TILES = true;

namespace tiles {

constexpr std::int64_t LINE = 64;  // bytes

// Configures this thread's tiles, and releases them: others who use tiles configure theirs. lines: of tiles 0 to 5; 6 and 7 have 16.
class Shapes {
 public:
  explicit Shapes(std::uint8_t lines = 16) {
    for (int tile = 0; tile < 8; tile++) {
      own_.lines[tile] = tile < 6 ? lines : 16;
      own_.bytes[tile] = LINE;
    }
    asm volatile("ldtilecfg %0" ::"m"(own_) : "memory");
  }
  ~Shapes() { asm volatile("tilerelease" ::: "memory"); }
  Shapes(const Shapes &) = delete;
  Shapes &operator=(const Shapes &) = delete;

 private:
  struct alignas(64) {
    std::uint8_t palette = 1, start = 0, unused[14] = {};
    std::uint16_t bytes[16] = {};
    std::uint8_t lines[16] = {};
  } own_;
};

// Written as assembly: not all compilers know these instructions, and their functions do not say that they read memory.
// line: bytes from one line of the tile to the next.
template <int TILE>
inline void load(const void *from, std::int64_t line = LINE) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(line), "i"(TILE) : "memory");
}

template <int TILE>
inline void store(void *to, std::int64_t line = LINE) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(line), "i"(TILE) : "memory");
}

// So many tiles from the first on.
template <int FIRST, int COUNT>
inline void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(FIRST));
  if constexpr (COUNT > 1) zero<FIRST + 1, COUNT - 1>();
}

// UNSIGNED: bytes of W are, those of X never.
template <int SUM, int X, int W, bool UNSIGNED>
inline void add_products() {
  if constexpr (UNSIGNED) {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(X), "i"(W));
  } else {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(X), "i"(W));
  }
}

template <int SUM, int LEFT, int RIGHT>
inline void add_brief_products() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(LEFT), "i"(RIGHT));
}

// Tiles SUM and SUM + 1 = two tiles of x, LINES each, times the low and the high parts of two tiles of weights. UNSIGNED: high ones
// are.
template <int SUM, int LINES, bool UNSIGNED>
inline void multiply(const std::int8_t *x, const ivec *low, const ivec *high) {
  zero<SUM, 2>();
  load<4>(x);
  load<6>(low);
  add_products<SUM, 4, 6, true>();
  load<7>(high);
  add_products<SUM + 1, 4, 7, UNSIGNED>();
  load<5>(x + LINES * LINE);
  load<6>(low + 16);
  add_products<SUM, 5, 6, true>();
  load<7>(high + 16);
  add_products<SUM + 1, 5, 7, UNSIGNED>();
}

inline ivec load(const std::int32_t *p) { return (ivec)::load(reinterpret_cast<const float *>(p)); }

// Bytes of four weights an output, less ZERO, times a whole number of each output: high << SHIFT, + low, which is unsigned.
template <int ZERO>
class Products {
 public:
  static constexpr bool UNSIGNED = false;
  static constexpr int SHIFT = 8;

  INLINED explicit Products(ivec number)
      : even_((number & 255) | (number & 255) << 16), odd_(even_ << 8), less_((number * ZERO & 0xffff) * 0x10001) {}

  INLINED void of(ivec w, ivec &low, ivec &high) const {
    const ivec first = less(_mm512_maddubs_epi16((__m512i)w, (__m512i)even_));
    const ivec second = less(_mm512_maddubs_epi16((__m512i)w, (__m512i)odd_));
    low = (first & 0x00ff00ff) | (second << 8 & ~0x00ff00ff);
    high = (first >> 8 & 0x00ff00ff) | (second & ~0x00ff00ff);
  }

 private:
  INLINED ivec less(__m512i x) const { return (ivec)_mm512_sub_epi16(x, (__m512i)less_); }

  ivec even_, odd_, less_;
};

// The same of weights of five bits times a number of six. A product with three of these is a byte, so two are one product of words.
template <>
class Products<0> {
 public:
  static constexpr bool UNSIGNED = true;
  static constexpr int SHIFT = 3;

  INLINED explicit Products(ivec number) : low_((number & 7) * 0x10001), high_((number >> SHIFT) * 0x10001) {}

  INLINED void of(ivec w, ivec &low, ivec &high) const {
    low = (ivec)_mm512_mullo_epi16((__m512i)w, (__m512i)low_);
    high = (ivec)_mm512_mullo_epi16((__m512i)w, (__m512i)high_);
  }

 private:
  ivec low_, high_;
};

}  // namespace tiles
#else
constexpr bool TILES = false;

namespace tiles {
struct Shapes {};
}  // namespace tiles
#endif
