// dot_columns() of isa.h by Arm's dot products: sdot (dotprod, an option of Armv8.2), or usdot and usmmla (i8mm, Armv8.6).
#include <arm_neon.h>

constexpr bool HAVE_DOT_COLUMNS = true;

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool HAVE_I8MM = true;
constexpr int DOT4_MAX_CODE = 255;
constexpr int ROW_RUN = 8;

// As dot4_accumulate() of isa.h, with activations 4 LANE to 4 LANE + 3 of x.
template <int MAX_CODE, int LANE> static inline ivec dot4_accumulate(ivec sum, ivec w, int8x16_t x) {
  return (ivec)vusdotq_laneq_s32((int32x4_t)sum, (uint8x16_t)w, x, LANE);
}

// Adds the dot products of two outputs, 8 codes of each, with two rows, 8 activations of each. Lanes of `sum`: the first output with both
// rows, the second output with both rows.
static inline int32x4_t dot8_accumulate(int32x4_t sum, uint32x4_t w, int8x16_t x) { return vusmmlaq_s32(sum, (uint8x16_t)w, x); }
#else
constexpr bool HAVE_I8MM = false;
constexpr int DOT4_MAX_CODE = 127;  // codes are multiplied as int8
constexpr int ROW_RUN = SUB_BLOCK;

template <int MAX_CODE, int LANE> static inline ivec dot4_accumulate(ivec sum, ivec w, int8x16_t x) {
  int8x16_t codes = (int8x16_t)w;
  if constexpr (MAX_CODE > DOT4_MAX_CODE) codes = veorq_s8(codes, vdupq_n_s8(-128));
  return (ivec)vdotq_laneq_s32((int32x4_t)sum, codes, x, LANE);
}

int32x4_t dot8_accumulate(int32x4_t sum, uint32x4_t w, int8x16_t x);  // never called
#endif

template <int MAX_CODE, int R, int COUNT, typename W>
ALWAYS_INLINE inline void dot_columns(const W &w, int first, const std::int8_t *x, ivec *sums) {
  constexpr int PAIRS = HAVE_I8MM ? R / 2 : 0;
  int32x4_t pair_sums[2][PAIRS + 1] = {};
  UNROLL for (int i = first; PAIRS > 0 && i < first + COUNT; i += 2) {
    const auto left = (uint32x4_t)w(i), right = (uint32x4_t)w(i + 1);
    const uint32x4_t two_outputs[] = {vzip1q_u32(left, right), vzip2q_u32(left, right)};
    UNROLL for (int p = 0; p < PAIRS; p++) {
      const int8x16_t two_rows = vld1q_s8(x + 2 * p * SUB_BLOCK + 8 * i);
      UNROLL for (int o = 0; o < 2; o++) pair_sums[o][p] = dot8_accumulate(pair_sums[o][p], two_outputs[o], two_rows);
    }
  }
  UNROLL for (int p = 0; p < PAIRS; p++) {
    sums[2 * p] += (ivec)vuzp1q_s32(pair_sums[0][p], pair_sums[1][p]);
    sums[2 * p + 1] += (ivec)vuzp2q_s32(pair_sums[0][p], pair_sums[1][p]);
  }
  UNROLL for (int i = first; 2 * PAIRS < R && i < first + COUNT; i += 4) {
    const ivec codes[] = {w(i), w(i + 1), w(i + 2), w(i + 3)};
    UNROLL for (int r = 2 * PAIRS; r < R; r++) {
      const int8x16_t row = vld1q_s8(x + r * SUB_BLOCK + 4 * i);
      sums[r] = dot4_accumulate<MAX_CODE, 0>(sums[r], codes[0], row);
      sums[r] = dot4_accumulate<MAX_CODE, 1>(sums[r], codes[1], row);
      sums[r] = dot4_accumulate<MAX_CODE, 2>(sums[r], codes[2], row);
      sums[r] = dot4_accumulate<MAX_CODE, 3>(sums[r], codes[3], row);
    }
  }
}
