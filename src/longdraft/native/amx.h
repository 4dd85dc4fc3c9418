// Wraps AMX instructions. A tile has 16 rows of 64 bytes (int8, or pairs of bfloat16). One instruction multiplies two tiles and adds
// the product to a third tile, of int32 or float32.
#pragma once

#include "vectors.h"

#include <cstdint>

#if defined(LONGDRAFT_AMX)
constexpr bool HAVE_AMX = true;

namespace amx {

constexpr std::int64_t ROW_BYTES = 64;  // of a tile

// Configures this thread's tiles for the object's lifetime. rows: of tiles 0 to 5 (sums, activations); tiles 6 and 7 (weights) have 16.
class TileConfig {
 public:
  explicit TileConfig(std::uint8_t rows = 16) {
    for (int tile = 0; tile < 8; tile++) {
      config_.rows[tile] = tile < 6 ? rows : 16;
      config_.bytes[tile] = ROW_BYTES;
    }
    asm volatile("ldtilecfg %0" ::"m"(config_) : "memory");
  }
  ~TileConfig() { asm volatile("tilerelease" ::: "memory"); }
  TileConfig(const TileConfig &) = delete;
  TileConfig &operator=(const TileConfig &) = delete;

 private:
  struct alignas(64) {
    std::uint8_t palette = 1, start = 0, unused[14] = {};
    std::uint16_t bytes[16] = {};
    std::uint8_t rows[16] = {};
  } config_;
};

// In assembly, because older compilers lack these instructions, and intrinsics do not declare that they access memory.
// stride: bytes between rows.
template <int TILE>
inline void load(const void *from, std::int64_t stride = ROW_BYTES) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE>
inline void store(void *to, std::int64_t stride = ROW_BYTES) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
}

// Zeroes COUNT tiles from FIRST on.
template <int FIRST, int COUNT>
inline void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(FIRST));
  if constexpr (COUNT > 1) zero<FIRST + 1, COUNT - 1>();
}

// SUM += X (int8) times W (int8, or uint8 if UNSIGNED).
template <int SUM, int X, int W, bool UNSIGNED>
inline void dot_int8() {
  if constexpr (UNSIGNED) {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(X), "i"(W));
  } else {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(X), "i"(W));
  }
}

template <int SUM, int X, int W>
inline void dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(X), "i"(W));
}

// Tiles SUM, SUM + 1 = two tiles of x, with ROWS rows, times the low (uint8) and the high parts of two tiles of weights.
template <int SUM, int ROWS, bool UNSIGNED>
inline void multiply(const std::int8_t *x, const ivec *low, const ivec *high) {
  zero<SUM, 2>();
  load<4>(x);
  load<6>(low);
  dot_int8<SUM, 4, 6, true>();
  load<7>(high);
  dot_int8<SUM + 1, 4, 7, UNSIGNED>();
  load<5>(x + ROWS * ROW_BYTES);
  load<6>(low + 16);
  dot_int8<SUM, 5, 6, true>();
  load<7>(high + 16);
  dot_int8<SUM + 1, 5, 7, UNSIGNED>();
}

inline ivec load(const std::int32_t *p) { return (ivec)::load(reinterpret_cast<const float *>(p)); }

// Splits weights (code - ZERO_POINT) * sc of 16 bits into two bytes, (high << SHIFT) + low with an unsigned low, because tiles multiply
// bytes: sums of 128 products with activations stay exact in int32. sc: the sub-block's integer scale of each output (lane).
template <int ZERO_POINT>
class SplitWeights {
 public:
  static constexpr bool UNSIGNED = false;
  static constexpr int SHIFT = 8;

  ALWAYS_INLINE explicit SplitWeights(ivec sc)
      : sc_even_((sc & 255) | (sc & 255) << 16), sc_odd_(sc_even_ << 8), zero_sum_((sc * ZERO_POINT & 0xffff) * 0x10001) {}

  ALWAYS_INLINE void split(ivec w, ivec &low, ivec &high) const {
    const ivec even = subtract_zero_point(_mm512_maddubs_epi16((__m512i)w, (__m512i)sc_even_));
    const ivec odd = subtract_zero_point(_mm512_maddubs_epi16((__m512i)w, (__m512i)sc_odd_));
    low = (even & 0x00ff00ff) | (odd << 8 & ~0x00ff00ff);
    high = (even >> 8 & 0x00ff00ff) | (odd & ~0x00ff00ff);
  }

 private:
  ALWAYS_INLINE ivec subtract_zero_point(__m512i x) const { return (ivec)_mm512_sub_epi16(x, (__m512i)zero_sum_); }

  ivec sc_even_, sc_odd_, zero_sum_;
};

// Splits sc of 6 bits into 3 lower and 3 upper bits instead. Codes have up to 5 bits, and 5 + 3 bits fit a byte, so one 16-bit
// multiplication (vpmullw) computes two codes.
template <>
class SplitWeights<0> {
 public:
  static constexpr bool UNSIGNED = true;
  static constexpr int SHIFT = 3;

  ALWAYS_INLINE explicit SplitWeights(ivec sc) : sc_low_((sc & 7) * 0x10001), sc_high_((sc >> SHIFT) * 0x10001) {}

  ALWAYS_INLINE void split(ivec w, ivec &low, ivec &high) const {
    low = (ivec)_mm512_mullo_epi16((__m512i)w, (__m512i)sc_low_);
    high = (ivec)_mm512_mullo_epi16((__m512i)w, (__m512i)sc_high_);
  }

 private:
  ivec sc_low_, sc_high_;
};

}  // namespace amx
#else
constexpr bool HAVE_AMX = false;

namespace amx {
struct TileConfig {};
}  // namespace amx
#endif
