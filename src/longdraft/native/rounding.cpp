// Rows of x, rounded to eight bits for int8 arithmetic.
#include "formats.h"
#include "products.h"
#include "threads.h"

#include <algorithm>

namespace {

// In each lane the larger of it and the one whose number differs by BIT.
template <typename Larger, int BIT, int... I>
INLINED inline vec larger_of_pair(vec x, std::integer_sequence<int, I...>) { return Larger::of(x, shuffled<(I ^ BIT)...>(x, x)); }

// LANES blocks of 32 numbers side by side, or as many as remain of `made`, from number `first_block` of all its rows on.
void round_blocks(const float *x, const Int8Rows &made, int64_t first_block) {
  constexpr float SHIFT = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, kept in the lowest bits
  constexpr std::int32_t INFINITE = 0x7f800000;
  struct LargerBits {  // compares bits of non-negative numbers, where NaN is the largest
    static inline vec of(vec a, vec b) { return (vec)((ivec)a > (ivec)b ? (ivec)a : (ivec)b); }
  };
  const int64_t each = made.size / PIECE, count = std::min<int64_t>(LANES, made.rows * each - first_block);
  const auto place = [&](int64_t b) { return made.place((first_block + b) / each, (first_block + b) % each); };
  x += first_block * PIECE;
  vec largest[LANES];
  for (int b = 0; b < LANES; b++) {
    const float *own = x + std::min<int64_t>(b, count - 1) * PIECE;
    ivec most = {};
    UNROLLED for (int i = 0; i < PARTS; i++) {
      const ivec bits = (ivec)load(own + i * LANES) & 0x7fffffff;
      most = bits > most ? bits : most;
    }
    largest[b] = (vec)most;
  }
  vec high = across<LargerBits, LANES>(largest);
  if (made.pieces == 4) {
    constexpr auto ALL = std::make_integer_sequence<int, LANES>{};
    high = larger_of_pair<LargerBits, 2>(larger_of_pair<LargerBits, 1>(high, ALL), ALL);
  }
  const ivec bits = (ivec)high;
  const vec factor = 127.0f / high;
  const ivec fine = (ivec)factor < INFINITE;  // else all numbers are zero or tiny, and become 0
  const vec nothing = bits < INFINITE ? vec{} : high - high;  // NaN if a number is infinite or NaN
  const vec factors = (bits < INFINITE) & fine ? factor : vec{}, scales = fine & (bits < INFINITE) ? high / 127.0f : nothing;
  float factor_of[LANES], scale_of[LANES];
  store(factor_of, factors);
  store(scale_of, scales);
  vec halves_of[2][LANES];
  for (int b = 0; b < LANES; b++) {
    const float *own = x + std::min<int64_t>(b, count - 1) * PIECE;
    const bool none = factor_of[b] == 0.0f;
    for (int h = 0; h < 2; h++) {
      vec sum = {};
      UNROLLED for (int i = 0; i < PARTS / 2; i++) {
        const int at = (h * PARTS / 2 + i) * LANES;
        const vec shifted = (none ? vec{} : load(own + at) * factor_of[b]) + SHIFT;
        sum += shifted - SHIFT;
        const ivec whole = (ivec)shifted - 0x4b400000;
        if (b >= count) continue;
        std::int8_t *numbers = made.numbers + place(b) * PIECE + at;
#if defined(__AVX512F__)
        _mm_storeu_si128(reinterpret_cast<__m128i *>(numbers), _mm512_cvtepi32_epi8((__m512i)whole));
#else
        for (int l = 0; l < LANES; l++) numbers[l] = static_cast<std::int8_t>(whole[l]);
#endif
      }
      halves_of[h][b] = sum;
    }
  }
  float first[LANES], second[LANES];
  store(first, sums<LANES>(halves_of[0]));
  store(second, sums<LANES>(halves_of[1]));
  for (int b = 0; b < count; b++) {
    const float scale = scale_of[b];
    if (made.lines) {
      Int8Rows::Four &four = made.four((first_block + b) / each, (first_block + b) % each / 4);
      four.scale = scale;
      four.sums[b % 4] = scale * (first[b] + second[b]);
      continue;
    }
    const auto one = -static_cast<std::int32_t>(first[b]), two = -static_cast<std::int32_t>(second[b]);
    made.blocks[place(b)] = {scale, scale * (first[b] + second[b]), {scale * first[b], scale * second[b]}, one + two, {one, two}, 0};
  }
}

}  // namespace

void round_rows(const float *x, const Int8Rows &made, int threads) {
  constexpr int64_t SHARE = 16;  // vectors of blocks that a thread takes at a time
  const int64_t each = made.size / PIECE, blocks = made.rows * each;
  const int64_t vectors = (blocks + LANES - 1) / LANES;
  share_out(vectors > 4 * SHARE ? threads : 1, (vectors + SHARE - 1) / SHARE, [=](int64_t share) {
    for (int64_t v = share * SHARE; v < std::min(vectors, (share + 1) * SHARE); v++) {
      round_blocks(x, made, v * LANES);
    }
  });
  // Rows behind the last are zeros: numbers that happen to lie there can be so small that processors are slow with them.
  for (int64_t row = made.rows; row < made.room(); row++) {
    for (int64_t i = 0; i < each; i++) std::memset(made.numbers + made.place(row, i) * PIECE, 0, PIECE);
    for (int64_t i = 0; !made.lines && i < each; i++) made.blocks[made.place(row, i)] = {};
    for (int64_t i = 0; made.lines && i < each / 4; i++) made.four(row, i) = {};
  }
}
