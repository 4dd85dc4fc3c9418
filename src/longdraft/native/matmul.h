// Matrix products that compute a range of a matrix's outputs, with activations in float32, int8 or bfloat16. The bits of a row do not
// depend on other rows.
#pragma once

#include "kernels.h"
#include "packed_rows.h"

#include <cstdint>

// Computes outputs [from, to) for all rows of x (rows, n_in).
void float_outputs(const float *x, std::int64_t rows, std::int64_t n_in, const Matrix &m, std::int64_t from, std::int64_t to);

// Activations quantized to int8 like ggml's block_q8_1 and block_q8_K: x = q * scale, q from -127 to 127, with a scale for 32 numbers, or
// for 128 with K-quants (SUB_BLOCKS_PER_SCALE).
//
// Layout: (group of ROW_GROUP rows, block of 32, row), so that all factors of a sub-block of w are contiguous. A last group of 5 or 7
// rows is padded by a row of zeros. For AMX: (group of tile_rows rows, pair of blocks, row), padded by zeros.
struct Int8Activations {
  static constexpr std::int64_t ROW_GROUP = 8;

  // Of 32 numbers: the scale; scale * sum(q) of all and of each half, for mins; -sum(q) of all and of each half, for zero points.
  struct Block {
    float scale, sum, half_sum[2];
    std::int32_t neg_qsum, neg_half_qsum[2], unused;
  };

  // Of 128 numbers, for AMX: the scale; scale * sum(q) of each 32.
  struct Block128 {
    float scale, sums[4], unused[3];
  };

  std::int8_t *qs;  // quantized numbers, 32 for each block
  union {
    Block *blocks;
    Block128 *blocks128;
  };
  std::int64_t rows, n_in;            // n_in: a multiple of 32
  std::int64_t sub_blocks_per_scale;  // 1 or 4
  std::int64_t tile_rows;             // rows of an AMX tile, 8, 12 or 16; 0 without AMX

  // Number of rows, with padding, of the group that contains a row.
  std::int64_t group_rows(std::int64_t row) const {
    if (tile_rows) return tile_rows;
    const std::int64_t rows_left = rows - row / ROW_GROUP * ROW_GROUP;
    return rows_left >= ROW_GROUP ? ROW_GROUP : rows_left + (rows_left == 5 || rows_left == 7);
  }

  // Number of all rows, with padding.
  std::int64_t padded_rows() const {
    const std::int64_t group = tile_rows ? tile_rows : ROW_GROUP;
    return (rows - 1) / group * group + group_rows(rows - 1);
  }

  // Index of a row's block in qs and blocks.
  std::int64_t block_index(std::int64_t row, std::int64_t block) const {
    if (tile_rows) return row / tile_rows * tile_rows * (n_in / 32) + block / 2 * 2 * tile_rows + row % tile_rows * 2 + block % 2;
    return row / ROW_GROUP * ROW_GROUP * (n_in / 32) + block * group_rows(row) + row % ROW_GROUP;
  }

  Block128 &block128(std::int64_t row, std::int64_t index) const {
    return blocks128[row / tile_rows * tile_rows * (n_in / 128) + index * tile_rows + row % tile_rows];
  }
};

// SUB_BLOCKS_PER_SCALE of a format.
std::int64_t sub_blocks_per_act_scale(Format format);

// Activations of these sizes, whose pointers are null.
Int8Activations int8_activations(std::int64_t rows, std::int64_t n_in, std::int64_t sub_blocks_per_scale);

// Quantizes x (rows, n_in). A NaN or infinite number makes its scale NaN.
void quantize_rows(const float *x, const Int8Activations &to, int threads);

// Activations in bfloat16, for AMX: (group of ROW_GROUP rows, 32 numbers, row), padded by zeros.
struct Bf16Activations {
  static constexpr std::int64_t ROW_GROUP = 32;

  BFloat16 *values;
  std::int64_t rows, n_in;  // n_in: a multiple of 32

  // Number of all rows, with padding.
  std::int64_t padded_rows() const { return (rows + ROW_GROUP - 1) / ROW_GROUP * ROW_GROUP; }
};

void quantize_rows(const float *x, const Bf16Activations &to, int threads);

// Outputs [from, to) of a quantized matrix for a prompt's rows, with AMX. `from` is a multiple of INT8_OUTPUT_MULTIPLE.
void bf16_outputs(const Bf16Activations &x, const Matrix &m, std::int64_t from, std::int64_t to);

// Outputs [from, to) of silu(gate(x)) * up(x), or with GELU, for matrices of one format. `from` is a multiple of ROW_GROUP.
void bf16_outputs(const Bf16Activations &x, const Matrix &gate, const Matrix &up, bool gelu, std::int64_t from, std::int64_t to,
                   const Bf16Activations &y);

// A gated MLP: down.y = down(silu(gate(x)) * up(x)), or with GELU. gate.y and up.y are unused.
void gated_mlp(const float *x, std::int64_t rows, std::int64_t n_in, const Matrix &gate, const Matrix &up, bool gelu,
                    const Matrix &down, bool prompt, int threads);

// Outputs [from, to) of a quantized matrix for all rows of x. `from` is a multiple of INT8_OUTPUT_MULTIPLE.
// For each activation scale, in order: y += min * scale * sum(q) for each min, then y += scale * d * s, where s sums sc * (sum of
// products) over the sub-blocks. s is exact, and each addition rounds once, so a row's bits depend neither on other rows nor on the
// instruction set.
constexpr std::int64_t INT8_OUTPUT_MULTIPLE = 16;
void int8_outputs(const Int8Activations &x, const Matrix &m, std::int64_t from, std::int64_t to);
