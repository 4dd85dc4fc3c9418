// y = x W^T + b with weights of four bits: for a target that drafts for itself, whose speed is limited by reading weights.
//
// A block is 32 consecutive weights of an output, each scale * number + least, with numbers from 0 to 15. A row of x becomes
// integers of thirteen bits and a scale, as in rounded.cpp, so a block's products are integer sums. Blocks are added as floats
// in order, without fused operations, so results are the same for every instruction set.
#include "rounded.h"
#include "tiles.h"
#include "whole_numbers.h"

namespace {

constexpr int64_t SHARE = 48;              // outputs that a thread takes at a time: whole tiles of every shape
constexpr int64_t VECTORS = BAND / LANES;  // of sums, for a band's outputs
constexpr float LIMIT = 4095;              // of x's numbers: 32 * 15 * 4095 is a float without rounding

struct Four {
  pairs first, second;
};

// The numbers of LANES outputs for four inputs: in a byte, one of the first two and one of the second two.
inline Four four(const std::uint8_t *p) {
#if defined(__AVX512BW__)
  const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)), low = _mm256_set1_epi8(15);
  return {(pairs)_mm512_cvtepu8_epi16(_mm256_and_si256(both, low)),
          (pairs)_mm512_cvtepu8_epi16(_mm256_and_si256(_mm256_srli_epi16(both, 4), low))};
#elif defined(__AVX2__)
  const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p)), low = _mm_set1_epi8(15);
  return {(pairs)_mm256_cvtepu8_epi16(_mm_and_si128(both, low)),
          (pairs)_mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16(both, 4), low))};
#elif defined(__aarch64__)
  const uint8x8_t both = vld1_u8(p);
  return {(pairs)vmovl_u8(vand_u8(both, vdup_n_u8(15))), (pairs)vmovl_u8(vshr_n_u8(both, 4))};
#else
  Four x;
  for (int i = 0; i < 2 * LANES; i++) {
    x.first[i] = p[i] & 15;
    x.second[i] = p[i] >> 4;
  }
  return x;
#endif
}

// LANES bfloat16 numbers.
inline vec brief(const std::uint8_t *p) {
#if defined(__AVX512F__)
  return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))), 16);
#elif defined(__AVX2__)
  return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))), 16);
#else
  vec x;
  for (int i = 0; i < LANES; i++) {
    std::uint16_t bits;
    std::memcpy(&bits, p + 2 * i, sizeof bits);
    const std::uint32_t whole = static_cast<std::uint32_t>(bits) << 16;
    float number;
    std::memcpy(&number, &whole, sizeof number);
    x[i] = number;
  }
  return x;
#endif
}

struct Rows {
  const std::int16_t *x;  // (rows, size)
  const float *scales;    // (rows,)
  const float *sums;      // (rows, size / NIBBLED_BLOCK): of a block's numbers
  int64_t rows, size;     // size: of a row, filled up with zeros

  template <int R, int O>
  void tile(const Matrix &m, int64_t band, Group group) const;
};

// The group's R rows of x times O bands of W, starting at `band`.
template <int R, int O>
inline void Rows::tile(const Matrix &m, int64_t band, Group group) const {
  constexpr int N = O * VECTORS;
  constexpr int64_t BYTES = NIBBLED_BLOCK / 2 * BAND;  // of a block's numbers; then come scales, then leasts
  const std::uint8_t *w = static_cast<const std::uint8_t *>(m.w) + band * m.w_row;
  const int64_t blocks = size / NIBBLED_BLOCK;
  vec found[R * N] = {};
  for (int64_t block = 0; block < blocks; block++, w += NIBBLED_BYTES) {
    UNROLLED for (int o = 0; o < O; o++) {
      UNROLLED for (int line = 0; line < NIBBLED_BYTES; line += 64) __builtin_prefetch(w + (O + o) * m.w_row + line);
    }
    ivec acc[R * N] = {};
    UNROLLED for (int i = 0; i < NIBBLED_BLOCK; i += 4) {
      UNROLLED for (int v = 0; v < N; v++) {
        const Four b = four(w + v / VECTORS * m.w_row + (i / 2 * BAND) + v % VECTORS * 2 * LANES);
        UNROLLED for (int r = 0; r < R; r++) {
          std::int32_t pair[2];
          std::memcpy(pair, x + (group.row + r) * size + block * NIBBLED_BLOCK + i, sizeof pair);
          acc[r * N + v] = plus(acc[r * N + v], (pairs)(ivec{} + pair[0]), b.first);
          acc[r * N + v] = plus(acc[r * N + v], (pairs)(ivec{} + pair[1]), b.second);
        }
      }
    }
    UNROLLED for (int v = 0; v < N; v++) {
      const std::uint8_t *ends = w + v / VECTORS * m.w_row + BYTES + v % VECTORS * 2 * LANES;
      const vec scale = brief(ends), least = brief(ends + 2 * BAND);
      UNROLLED for (int r = 0; r < R; r++) {
        vec &to = found[r * N + v];
        to = to + __builtin_convertvector(acc[r * N + v], vec) * scale;
        to = to + every(sums[(group.row + r) * blocks + block]) * least;
      }
    }
  }
  UNROLLED for (int v = 0; v < N; v++) {
    const int64_t out = band * BAND + v * LANES, here = std::min<int64_t>(LANES, m.outs - out);
    if (here <= 0) return;
    const auto read = [=](const float *p) { return here == LANES ? load(p) : load_some(p, here); };
    const vec bias = m.bias ? read(m.bias + out) : vec{};
    UNROLLED for (int r = 0; r < R; r++) {
      float *y = m.y + (group.row + r) * m.outs + out;
      vec total = found[r * N + v] * scales[group.row + r] + bias;
      if (m.adds) total = read(y) + total;
      here == LANES ? store(y, total) : store_some(y, total, here);
    }
  }
}

}  // namespace

void nibbled_linear(const float *x, int64_t rows, int64_t size, const Matrix *matrices, int64_t count, int threads) {
  static thread_local Scratch scratch;
  const int64_t blocks = (size + NIBBLED_BLOCK - 1) / NIBBLED_BLOCK, padded = blocks * NIBBLED_BLOCK;
  const int64_t of_scales = Scratch::whole_lines(rows), of_sums = Scratch::whole_lines(rows * blocks);
  float *scales = scratch.of(of_scales + of_sums + rows * padded / 2), *sums = scales + of_scales;
  std::int16_t *numbers = reinterpret_cast<std::int16_t *>(sums + of_sums);
  for (int64_t r = 0; r < rows; r++) {
    scales[r] = round_row(x + r * size, size, LIMIT, numbers + r * padded, padded);
    for (int64_t block = 0; block < blocks; block++) {
      std::int32_t sum = 0;
      for (int64_t i = 0; i < NIBBLED_BLOCK; i++) sum += numbers[r * padded + block * NIBBLED_BLOCK + i];
      sums[r * blocks + block] = static_cast<float>(sum);
    }
  }
  const Rows in{numbers, scales, sums, rows, padded};
  share_outputs<SHARE>(matrices, count, threads, [&](const Matrix &m, int64_t from, int64_t to) {
    outputs<LANES == 16 ? 4 : 2, LANES == 16 ? 3 : 1>(in, m, from / BAND, (to + BAND - 1) / BAND);
  });
}

// A float to bfloat16 and back.
static inline float shortened(float number, std::uint16_t *to) {
  std::uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
  *to = static_cast<std::uint16_t>(bits >> 16);
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

Code longdraft_nibble(const float *weights, int64_t outs, int64_t size, std::uint8_t *data, int threads) try {
  const int64_t blocks = (size + NIBBLED_BLOCK - 1) / NIBBLED_BLOCK, bands = (outs + BAND - 1) / BAND;
  share_out(threads, bands, [=](int64_t band) {
    std::uint8_t *to = data + band * blocks * NIBBLED_BYTES;
    std::memset(to, 0, blocks * NIBBLED_BYTES);
    for (int64_t o = 0; o < std::min(BAND, outs - band * BAND); o++) {
      const float *row = weights + (band * BAND + o) * size;
      for (int64_t block = 0; block < blocks; block++) {
        float each[NIBBLED_BLOCK] = {};  // a last block is filled up with zeros
        std::copy_n(row + block * NIBBLED_BLOCK, std::min(NIBBLED_BLOCK, size - block * NIBBLED_BLOCK), each);
        std::uint8_t *own = to + block * NIBBLED_BYTES;
        std::uint16_t ends[2];
        const float least = shortened(*std::min_element(each, each + NIBBLED_BLOCK), ends + 1);
        const float scale = shortened((*std::max_element(each, each + NIBBLED_BLOCK) - least) / 15, ends);
        for (int64_t i = 0; i < NIBBLED_BLOCK; i++) {
          const float number = std::nearbyintf((each[i] - least) / (scale > 0 ? scale : 1.0f));
          const auto four = static_cast<std::uint8_t>(std::min(std::max(number, 0.0f), 15.0f));
          own[i / 4 * 2 * BAND + 2 * o + i % 2] |= i % 4 < 2 ? four : four << 4;
        }
        for (int end = 0; end < 2; end++) std::memcpy(own + (16 + 2 * end) * BAND + 2 * o, ends + end, 2);
      }
    }
  });
  return DONE;
} CATCH_NO_MEMORY
