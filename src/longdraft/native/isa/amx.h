// Wraps AMX instructions. A tile is a register of 16 rows of 64 bytes (int8, or pairs of bfloat16). One instruction multiplies two tiles
// and adds the product to a third tile, of int32 or float32. Template arguments TILE, SUM, X and W are numbers of tiles, 0 to 7.
#pragma once

#include "../vectors.h"

#if defined(LONGDRAFT_AMX)
constexpr bool HAVE_AMX = true;

namespace amx {

constexpr std::int64_t ROW_BYTES = 64;  // bytes of a tile's row

// Configures this thread's tiles for the object's lifetime. Tiles 0 to 5, for sums and activations, get `rows` rows; tiles 6 and 7, for
// weights, get 16.
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
  struct alignas(64) {  // ldtilecfg's operand: 64 bytes, laid out as Intel's manual says
    std::uint8_t palette = 1, start = 0, unused[14] = {};
    std::uint16_t bytes[16] = {};
    std::uint8_t rows[16] = {};
  } config_;
};

// In assembly, because older compilers lack these instructions, and intrinsics do not declare that they access memory.
// stride: bytes between rows.
template <int TILE> inline void load(const void *from, std::int64_t stride = ROW_BYTES) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE> inline void store(void *to, std::int64_t stride = ROW_BYTES) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
}

// Zeroes COUNT tiles from FIRST on.
template <int FIRST, int COUNT> inline void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(FIRST));
  if constexpr (COUNT > 1) zero<FIRST + 1, COUNT - 1>();
}

// dot_int8 and dot_bf16 add tile X times tile W to tile SUM. X of dot_int8 is int8, W is int8, or uint8 if UNSIGNED.
template <int SUM, int X, int W, bool UNSIGNED> inline void dot_int8() {
  if constexpr (UNSIGNED) {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(X), "i"(W));
  } else {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(X), "i"(W));
  }
}

template <int SUM, int X, int W>
inline void dot_bf16() { asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(X), "i"(W)); }

// Multiplies 128 inputs, in two tiles of 64, with split weights: tile SUM = x * low, tile SUM + 1 = x * high. x has ROWS rows of int8; low
// is uint8, and high is uint8 if UNSIGNED, else int8.
template <int SUM, int ROWS, bool UNSIGNED> inline void multiply(const std::int8_t *x, const ivec *low, const ivec *high) {
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

// Splits the integer weights (code - ZERO_POINT) * int_scale of a sub-block, which have up to 16 bits, into two bytes, because tiles
// multiply bytes: weight = (high << SHIFT) + low, where low is unsigned. Sums of 128 products with activations are exact in int32.
// int_scale: a lane for each output, as in SubBlockScale (quants.h). split() takes 4 codes in each lane.
template <int ZERO_POINT>
class SplitWeights {
 public:
  static constexpr bool UNSIGNED = false;
  static constexpr int SHIFT = 8;

  // Factors for maddubs, which multiplies bytes and adds pairs of products: 0 for odd bytes gives the product of the even byte alone.
  ALWAYS_INLINE explicit SplitWeights(ivec int_scale)
      : even_factors_((int_scale & 255) | (int_scale & 255) << 16), odd_factors_(even_factors_ << 8),
        scaled_zero_points_((int_scale * ZERO_POINT & 0xffff) * 0x10001) {}  // times 0x10001: copied to both halves of a lane

  ALWAYS_INLINE void split(ivec codes, ivec &low, ivec &high) const {
    const ivec even = subtract_zero_point(_mm512_maddubs_epi16((__m512i)codes, (__m512i)even_factors_));
    const ivec odd = subtract_zero_point(_mm512_maddubs_epi16((__m512i)codes, (__m512i)odd_factors_));
    low = (even & 0x00ff00ff) | (odd << 8 & ~0x00ff00ff);
    high = (even >> 8 & 0x00ff00ff) | (odd & ~0x00ff00ff);
  }

 private:
  ALWAYS_INLINE ivec subtract_zero_point(__m512i x) const { return (ivec)_mm512_sub_epi16(x, (__m512i)scaled_zero_points_); }

  ivec even_factors_, odd_factors_, scaled_zero_points_;
};

// Without a zero point (Q4_K, Q5_K), splits the 6 bits of int_scale into 3 lower and 3 upper bits instead. A code of up to 5 bits times 3
// bits fits a byte, so one 16-bit multiplication (vpmullw) computes the products of two codes.
template <>
class SplitWeights<0> {
 public:
  static constexpr bool UNSIGNED = true;
  static constexpr int SHIFT = 3;

  ALWAYS_INLINE explicit SplitWeights(ivec int_scale)
      : low_factors_((int_scale & 7) * 0x10001), high_factors_((int_scale >> SHIFT) * 0x10001) {}

  ALWAYS_INLINE void split(ivec codes, ivec &low, ivec &high) const {
    low = (ivec)_mm512_mullo_epi16((__m512i)codes, (__m512i)low_factors_);
    high = (ivec)_mm512_mullo_epi16((__m512i)codes, (__m512i)high_factors_);
  }

 private:
  ivec low_factors_, high_factors_;
};

}  // namespace amx
#else
constexpr bool HAVE_AMX = false;

// What code names that HAVE_AMX keeps from running.
namespace amx {
struct TileConfig {
  explicit TileConfig(std::uint8_t = 16) {}
};
template <int TILE> void load(const void *from, std::int64_t stride);
ivec load(const std::int32_t *p);
template <int TILE> void store(void *to);
template <int SUM, int ROWS, bool UNSIGNED> void multiply(const std::int8_t *x, const ivec *low, const ivec *high);
template <int ZERO_POINT> class SplitWeights;
}  // namespace amx
#endif
