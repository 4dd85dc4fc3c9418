// Linear layers for a range of outputs, with activations in float32, int8 or bfloat16. A row's bits do not depend on other rows.
#pragma once

#include "kernels.h"
#include "packed_rows.h"

// Computes outputs [from, to) for all rows of x (rows, n_in).
void float_outputs(const float *x, std::int64_t rows, std::int64_t n_in, const Matrix &m, std::int64_t from, std::int64_t to);

// Activations quantized to int8 like ggml's block_q8_1 and block_q8_K: x = q * scale, with q from -127 to 127. A scale is for 32 numbers, or
// for 128 with K-quants (SUB_BLOCKS_PER_ACT_SCALE in quants.h).
//
// A block is 32 numbers of a row. Blocks that are multiplied with one sub-block of w lie side by side: rows are in groups of ROW_GROUP, and
// in a group the order is
//     block 0 of rows 0, 1, ..., 7, block 1 of rows 0, 1, ..., 7, ...
// A last group of 5 or 7 rows gets a row of zeros, so that fewer kernels are compiled. With AMX, groups have tile_rows rows (the last is
// padded by zeros), and pairs of blocks, which are a tile's row, take the place of blocks.
// If ROW_RUN < 32 (isa.h), two rows of a group that are side by side alternate within a block, every ROW_RUN numbers.
struct Int8Activations {
  static constexpr std::int64_t ROW_GROUP = 8;

  // Factors of 32 numbers q. Scaled sums are multiplied by the mins of weights, negative sums by their zero points (quants.h).
  struct Block {
    float scale, scaled_sum, scaled_half_sums[2];  // scale * sum(q), of all 32 and of each half
    std::int32_t neg_sum, neg_half_sums[2];        // -sum(q)
    std::int32_t packed_neg_half_sums;             // both in 16 bits
  };

  // Factors of 128 numbers, for AMX.
  struct Block128 {
    float scale, scaled_sums[4], unused[3];  // scale * sum(q) of each 32
  };

  std::int8_t *qs;  // quantized numbers, 32 for each block
  union {
    Block *blocks;        // without AMX
    Block128 *blocks128;  // with AMX
  };
  std::int64_t rows, n_in;                // n_in: a multiple of 32
  std::int64_t sub_blocks_per_act_scale;  // 1 or 4
  std::int64_t tile_rows;                 // rows of an AMX tile, 8, 12 or 16; 0 without AMX

  // Returns the number of rows, padding included, of the group that contains a row.
  std::int64_t group_rows(std::int64_t row) const {
    if (tile_rows) return tile_rows;
    const std::int64_t rows_left = rows - row / ROW_GROUP * ROW_GROUP;
    return rows_left >= ROW_GROUP ? ROW_GROUP : rows_left + (rows_left == 5 || rows_left == 7);
  }

  // Returns the number of all rows, padding included.
  std::int64_t padded_rows() const {
    const std::int64_t group = tile_rows ? tile_rows : ROW_GROUP;
    return (rows - 1) / group * group + group_rows(rows - 1);
  }

  // Returns the index of a row's block in qs and blocks.
  std::int64_t block_index(std::int64_t row, std::int64_t block) const {
    if (tile_rows) return row / tile_rows * tile_rows * (n_in / 32) + block / 2 * 2 * tile_rows + row % tile_rows * 2 + block % 2;
    return row / ROW_GROUP * ROW_GROUP * (n_in / 32) + block * group_rows(row) + row % ROW_GROUP;
  }

  // Returns where number i of a row's block lies, from the beginning of that block in qs.
  std::int64_t offset_in_block(std::int64_t row, std::int64_t i) const {
    const std::int64_t is_second = row % 2, in_pair = (row % ROW_GROUP | 1) < group_rows(row);
    if (ROW_RUN == SUB_BLOCK || !in_pair) return i;
    return (2 * (i / ROW_RUN) + is_second) * ROW_RUN + i % ROW_RUN - is_second * SUB_BLOCK;
  }

  // Sets a row's block of qs to 0.
  void clear_block(std::int64_t row, std::int64_t block) const {
    if (ROW_RUN == SUB_BLOCK) std::memset(qs + block_index(row, block) * SUB_BLOCK, 0, SUB_BLOCK);
    for (std::int64_t i = 0; ROW_RUN < SUB_BLOCK && i < SUB_BLOCK; i += ROW_RUN) {
      std::memset(qs + block_index(row, block) * SUB_BLOCK + offset_in_block(row, i), 0, ROW_RUN);
    }
  }

  Block128 &block128(std::int64_t row, std::int64_t index) const {
    return blocks128[row / tile_rows * tile_rows * (n_in / 128) + index * tile_rows + row % tile_rows];
  }
};

// Returns SUB_BLOCKS_PER_ACT_SCALE of a format: 1 or 4.
std::int64_t sub_blocks_per_act_scale(Format format);

// Returns Int8Activations of these sizes. The caller sets the pointers.
Int8Activations int8_activations(std::int64_t rows, std::int64_t n_in, std::int64_t sub_blocks_per_act_scale);

// Quantizes x (rows, n_in) to int8. The scale of a block with a NaN or infinite number is NaN.
void quantize_rows(const float *x, const Int8Activations &to, int threads);

// Activations in bfloat16, for AMX. Rows are in groups of ROW_GROUP, the last padded by zeros; a group has 32 numbers of each row, then the
// next 32 of each row, and so on.
struct Bf16Activations {
  static constexpr std::int64_t ROW_GROUP = 32;

  BFloat16 *values;
  std::int64_t rows, n_in;  // n_in: a multiple of 32

  // Returns the number of all rows, padding included.
  std::int64_t padded_rows() const { return (rows + ROW_GROUP - 1) / ROW_GROUP * ROW_GROUP; }
};

// Rounds x (rows, n_in) to bfloat16.
void quantize_rows(const float *x, const Bf16Activations &to, int threads);

// Computes outputs [from, to) of a quantized matrix for a prompt's rows, on AMX. `from` is a multiple of INT8_OUTPUT_MULTIPLE.
void bf16_outputs(const Bf16Activations &x, const Matrix &m, std::int64_t from, std::int64_t to);

// Computes columns [from, to) of y = silu(gate(x)) * up(x), or of gelu(gate(x)) * up(x), for matrices of one format. `from` is a multiple
// of ROW_GROUP.
void bf16_outputs(const Bf16Activations &x, const Matrix &gate, const Matrix &up, bool use_gelu, std::int64_t from, std::int64_t to,
                  const Bf16Activations &y);

// Computes a gated MLP: down.y = down(silu(gate(x)) * up(x)), or with gelu instead of silu. gate.y and up.y are not used.
void gated_mlp(const float *x, std::int64_t rows, std::int64_t n_in, const Matrix &gate, const Matrix &up, bool use_gelu,
               const Matrix &down, bool prefill, int threads);

// Computes outputs [from, to) of a quantized matrix for all rows of x. `from` is a multiple of INT8_OUTPUT_MULTIPLE.
// For each activation scale in order, adds first min * (scale * sum(q)) for each min, then scale * (d * s), where s is the sum of
// int_scale * (code - ZERO_POINT) * q (SubBlockScale in quants.h). s is exact, and each addition to y rounds once, so a row's bits depend
// neither on other rows nor on the instruction set.
constexpr std::int64_t INT8_OUTPUT_MULTIPLE = 16;
void int8_outputs(const Int8Activations &x, const Matrix &m, std::int64_t from, std::int64_t to);
