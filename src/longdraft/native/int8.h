// Products in int8 arithmetic: weights as they are stored, numbers of x rounded to eight bits in blocks of 32.
#pragma once

#include "kernels.h"

#include <cstdint>

// Rows of x, rounded. A block's numbers are q * scale, q from -127 to 127.
struct Int8Rows {
  // Of a block: its scale, and the sums of all of its numbers and of either half.
  struct Block {
    float scale;
    std::int32_t sum, half[2];
  };

  const std::int8_t *numbers;  // (rows, size)
  const Block *blocks;         // (rows, size / 32)
  std::int64_t rows, size;     // size: a multiple of 32
};

// Rounds rows of x (rows, size). The result lies in memory of the calling thread until it rounds again. Where a number of a
// block is none, or infinite, the block's scale is NaN.
Int8Rows int8_rows(const float *x, std::int64_t rows, std::int64_t size, int threads);

// Outputs [from, to) of a stored matrix for all rows of x. `from` is a multiple of INT8_UNIT.
// y = sum over blocks, in their order, of x's scale * (scale * sum of products + least * sum of x's numbers): the sums are
// whole numbers, and the floats are added one block after the other with one rounding, so a row's result depends neither on
// the rows beside it nor on the instruction set.
constexpr std::int64_t INT8_UNIT = 16;
void int8_outputs(const Int8Rows &x, const Matrix &m, std::int64_t from, std::int64_t to);
