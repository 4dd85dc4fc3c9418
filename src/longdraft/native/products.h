// Products of rows with a part of a matrix's outputs, in floats and in int8 arithmetic. A row's result does not depend on the
// rows beside it.
#pragma once

#include "kernels.h"

#include <cstdint>

// Outputs [from, to) of a matrix for all rows of x (rows, size).
void float_outputs(const float *x, std::int64_t rows, std::int64_t size, const Matrix &m, std::int64_t from, std::int64_t to);

// Rows of x, rounded to eight bits in blocks of 32. A block's numbers are q * scale, q from -127 to 127. Rows lie in groups of
// TOGETHER, so that what is multiplied with a piece of W lies side by side: (group, block, row of the group). A last group of 5
// or 7 rows has one of zeros behind them.
struct Int8Rows {
  static constexpr std::int64_t TOGETHER = 8;

  // Of a block: its scale, and the sums of all of its numbers and of either half, which are whole; and what these lack to 0.
  struct Block {
    float scale, sum, half[2];
    std::int32_t less, half_less[2], unused;
  };

  std::int8_t *numbers;  // 32 a block
  Block *blocks;
  std::int64_t rows, size;  // size: a multiple of 32

  // Rows of the group that a row is in, one of zeros included.
  std::int64_t width(std::int64_t row) const {
    const std::int64_t left = rows - row / TOGETHER * TOGETHER;
    return left >= TOGETHER ? TOGETHER : left + (left == 5 || left == 7);
  }

  // All rows, one of zeros included.
  std::int64_t room() const { return (rows - 1) / TOGETHER * TOGETHER + width(rows - 1); }

  // Where a row's block lies.
  std::int64_t place(std::int64_t row, std::int64_t block) const {
    return row / TOGETHER * TOGETHER * (size / 32) + block * width(row) + row % TOGETHER;
  }
};

// Rounds rows of x (rows, size). Where a number of a block is none, or infinite, the block's scale is NaN.
void round_rows(const float *x, const Int8Rows &to, int threads);

// Outputs [from, to) of a matrix in blocks for all rows of x. `from` is a multiple of INT8_UNIT.
// y = sum over blocks, in their order, of x's scale * (scale * sum of products + least * sum of x's numbers): the sums are
// whole numbers, and the floats are added one block after the other with one rounding, so a row's result does not depend on the
// instruction set either.
constexpr std::int64_t INT8_UNIT = 16;
void int8_outputs(const Int8Rows &x, const Matrix &m, std::int64_t from, std::int64_t to);
