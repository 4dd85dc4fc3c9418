// Products of rows with a part of a matrix's outputs, in floats, in int8 arithmetic and in bfloat16. A row's result does not depend on the
// rows beside it.
#pragma once

#include "kernels.h"
#include "stored.h"

#include <cstdint>

// Outputs [from, to) of a matrix for all rows of x (rows, size).
void float_outputs(const float *x, std::int64_t rows, std::int64_t size, const Matrix &m, std::int64_t from, std::int64_t to);

// Rows of x, rounded to eight bits: numbers are q * scale, q from -127 to 127, with a scale for as many as a format's PIECES hold.
//
// Rows lie in groups of TOGETHER, so that what is multiplied with a piece of W lies side by side: (group, block, row of the group).
// A last group of 5 or 7 rows has one of zeros behind them. Rows for tiles lie in whole groups of `lines`, zeros behind them:
// (group, two blocks, row).
struct Int8Rows {
  static constexpr std::int64_t TOGETHER = 8;

  // Of 32 numbers: their scale; the sums of all and of either half, times the scale; and what these lack to 0, as whole numbers.
  struct Block {
    float scale, sum, half[2];
    std::int32_t less, half_less[2], unused;
  };

  // The same of four blocks, for tiles.
  struct Four {
    float scale, sums[4], unused[3];
  };

  std::int8_t *numbers;  // 32 a block
  union {
    Block *blocks;
    Four *fours;
  };
  std::int64_t rows, size;  // size: a multiple of 32
  std::int64_t pieces;      // blocks with one scale
  std::int64_t lines;       // 8, 12 or 16; 0: not for tiles

  // Rows of the group that a row is in, one of zeros included.
  std::int64_t width(std::int64_t row) const {
    if (lines) return lines;
    const std::int64_t left = rows - row / TOGETHER * TOGETHER;
    return left >= TOGETHER ? TOGETHER : left + (left == 5 || left == 7);
  }

  // All rows, those without numbers included.
  std::int64_t room() const {
    const std::int64_t each = lines ? lines : TOGETHER;
    return (rows - 1) / each * each + width(rows - 1);
  }

  // Where a row's block lies.
  std::int64_t place(std::int64_t row, std::int64_t block) const {
    if (lines) return row / lines * lines * (size / 32) + block / 2 * 2 * lines + row % lines * 2 + block % 2;
    return row / TOGETHER * TOGETHER * (size / 32) + block * width(row) + row % TOGETHER;
  }

  Four &four(std::int64_t row, std::int64_t number) const {
    return fours[row / lines * lines * (size / 128) + number * lines + row % lines];
  }
};

// Blocks with one scale in rows that meet a matrix of this format.
std::int64_t int8_pieces(Format format);

// Such rows, without their memory.
Int8Rows int8_rows(std::int64_t rows, std::int64_t size, std::int64_t pieces);

// Rounds rows of x (rows, size). Where a number is none, or infinite, its scale is NaN.
void round_rows(const float *x, const Int8Rows &to, int threads);

// Rows of x in bfloat16, for tiles: (group of TOGETHER rows, 32 numbers, row), zeros behind the last row.
struct BriefRows {
  static constexpr std::int64_t TOGETHER = 32;

  Brief *numbers;
  std::int64_t rows, size;  // size: a multiple of 32

  // All rows, those of zeros included.
  std::int64_t room() const { return (rows + TOGETHER - 1) / TOGETHER * TOGETHER; }
};

void round_rows(const float *x, const BriefRows &to, int threads);

// Outputs [from, to) of a matrix in blocks for all rows of a prompt, where there are tiles. `from` is a multiple of INT8_UNIT.
void brief_outputs(const BriefRows &x, const Matrix &m, std::int64_t from, std::int64_t to);

// The same of an MLP's two matrices of one format: y = silu(gate) * up, or gelu(gate) * up. `from` is a multiple of TOGETHER.
void brief_outputs(const BriefRows &x, const Matrix &gate, const Matrix &up, bool by_gelu, std::int64_t from, std::int64_t to,
                   const BriefRows &y);

// A gated MLP's products, into down.y; those of the other two are not read.
void multiply_gated(const float *x, std::int64_t rows, std::int64_t size, const Matrix &gate, const Matrix &up, bool by_gelu,
                    const Matrix &down, bool prompt, int threads);

// Outputs [from, to) of a matrix in blocks for all rows of x. `from` is a multiple of INT8_UNIT.
// y = sum over x's scales, in their order, of the least values times sums of x's numbers, and x's scale * (float of W's block * sum
// of products, each times its whole number). That sum is exact, and what is added to y is rounded once, so a row's result depends
// neither on the rows beside it nor on the instruction set.
constexpr std::int64_t INT8_UNIT = 16;
void int8_outputs(const Int8Rows &x, const Matrix &m, std::int64_t from, std::int64_t to);
