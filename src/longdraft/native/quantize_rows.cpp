// Quantizes activations to int8, like ggml's quantize_row_q8_0 and quantize_row_q8_K.
#include "quants.h"
#include "matmul.h"
#include "threads.h"

namespace {

// Replaces each lane i by the maximum, by Op, of lanes i and i ^ BIT.
template <typename Op, int BIT, int... I>
ALWAYS_INLINE inline vec max_of_pair(vec x, std::integer_sequence<int, I...>) { return Op::apply(x, shuffle<(I ^ BIT)...>(x, x)); }

// Quantizes LANES blocks of 32 numbers at once, from block first_block on, or fewer at the end. Block i % blocks_per_row of row
// i / blocks_per_row has number i.
void quantize_blocks(const float *x, const Int8Activations &out, int64_t first_block) {
  constexpr float ROUND_MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which is then in the mantissa's lowest bits
  constexpr std::int32_t INFINITY_BITS = 0x7f800000;  // the bits of NaN are larger
  struct MaxBits {  // compares non-negative floats by their bits, so that NaN is the largest
    static inline vec apply(vec a, vec b) { return (vec)((ivec)a > (ivec)b ? (ivec)a : (ivec)b); }
  };
  const int64_t blocks_per_row = out.n_in / SUB_BLOCK, n_blocks = std::min<int64_t>(LANES, out.rows * blocks_per_row - first_block);
  const auto block_index = [&](int64_t b) {
    return out.block_index((first_block + b) / blocks_per_row, (first_block + b) % blocks_per_row);
  };
  x += first_block * SUB_BLOCK;
  vec max_abs[LANES];
  for (int b = 0; b < LANES; b++) {
    const float *block_x = x + std::min<int64_t>(b, n_blocks - 1) * SUB_BLOCK;
    ivec max_bits = {};
    UNROLL for (int i = 0; i < VECTORS_PER_SUB_BLOCK; i++) {
      const ivec bits = (ivec)load(block_x + i * LANES) & 0x7fffffff;
      max_bits = bits > max_bits ? bits : max_bits;
    }
    max_abs[b] = (vec)max_bits;
  }
  vec block_max = reduce_lanes<MaxBits, LANES>(max_abs);
  if (out.sub_blocks_per_act_scale == 4) {
    constexpr auto ALL = std::make_integer_sequence<int, LANES>{};
    block_max = max_of_pair<MaxBits, 2>(max_of_pair<MaxBits, 1>(block_max, ALL), ALL);
  }
  const ivec bits = (ivec)block_max;
  const vec inv_scale = 127.0f / block_max;
  const ivec is_normal = (ivec)inv_scale < INFINITY_BITS;  // else all numbers of the block are zero or tiny, and are quantized to 0
  const vec zero_or_nan = bits < INFINITY_BITS ? vec{} : block_max - block_max;  // NaN if a number is infinite or NaN
  const vec inv_scales = (bits < INFINITY_BITS) & is_normal ? inv_scale : vec{},
            scales = is_normal & (bits < INFINITY_BITS) ? block_max / 127.0f : zero_or_nan;
  float inv_scale_of[LANES], scale_of[LANES];
  store(inv_scale_of, inv_scales);
  store(scale_of, scales);
  vec half_sums[2][LANES];
  for (int b = 0; b < LANES; b++) {
    const float *block_x = x + std::min<int64_t>(b, n_blocks - 1) * SUB_BLOCK;
    const bool is_zero = inv_scale_of[b] == 0.0f;
    for (int h = 0; h < 2; h++) {
      vec sum = {};
      UNROLL for (int i = 0; i < VECTORS_PER_SUB_BLOCK / 2; i++) {
        const int offset = (h * VECTORS_PER_SUB_BLOCK / 2 + i) * LANES;
        const vec shifted = (is_zero ? vec{} : load(block_x + offset) * inv_scale_of[b]) + ROUND_MAGIC;
        sum += shifted - ROUND_MAGIC;
        const ivec q = (ivec)shifted - 0x4b400000;  // the bits of ROUND_MAGIC
        if (b >= n_blocks) continue;
        store_i8(out.qs + block_index(b) * SUB_BLOCK + out.offset_in_block((first_block + b) / blocks_per_row, offset), q);
      }
      half_sums[h][b] = sum;
    }
  }
  float first_half[LANES], second_half[LANES];
  store(first_half, horizontal_sums<LANES>(half_sums[0]));
  store(second_half, horizontal_sums<LANES>(half_sums[1]));
  for (int b = 0; b < n_blocks; b++) {
    const float scale = scale_of[b];
    if (out.tile_rows) {
      Int8Activations::Block128 &block128 = out.block128((first_block + b) / blocks_per_row, (first_block + b) % blocks_per_row / 4);
      block128.scale = scale;
      block128.scaled_sums[b % 4] = scale * (first_half[b] + second_half[b]);
      continue;
    }
    const auto neg_first = -static_cast<std::int32_t>(first_half[b]), neg_second = -static_cast<std::int32_t>(second_half[b]);
    out.blocks[block_index(b)] = {scale, scale * (first_half[b] + second_half[b]), {scale * first_half[b], scale * second_half[b]},
                                  neg_first + neg_second, {neg_first, neg_second}, pack_halves(neg_first, neg_second)};
  }
}

}  // namespace

void quantize_rows(const float *x, const Int8Activations &out, int threads) {
  constexpr int64_t ITEM_SIZE = 16;  // calls of quantize_blocks() in a work item
  const int64_t blocks_per_row = out.n_in / SUB_BLOCK, blocks = out.rows * blocks_per_row;
  const int64_t vectors = (blocks + LANES - 1) / LANES;
  parallel_for(vectors > 4 * ITEM_SIZE ? threads : 1, (vectors + ITEM_SIZE - 1) / ITEM_SIZE, [=](int64_t item) {
    for (int64_t v = item * ITEM_SIZE; v < std::min(vectors, (item + 1) * ITEM_SIZE); v++) quantize_blocks(x, out, v * LANES);
  });
  // Padding rows are set to zero, because arithmetic with leftover subnormal scales is slow.
  for (int64_t row = out.rows; row < out.padded_rows(); row++) {
    for (int64_t i = 0; i < blocks_per_row; i++) out.clear_block(row, i);
    for (int64_t i = 0; !out.tile_rows && i < blocks_per_row; i++) out.blocks[out.block_index(row, i)] = {};
    for (int64_t i = 0; out.tile_rows && i < blocks_per_row / 4; i++) out.block128(row, i) = {};
  }
}
