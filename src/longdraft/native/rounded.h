// Products of rounded numbers, for drafts.
#pragma once

#include "kernels.h"

// The format of a Matrix in bands of 16 outputs, `w_row` bytes each: for two inputs after the other the outputs' numbers
// of eight bits, an output's two beside one another, zeros up to a multiple of ROUNDED_UNIT inputs; then the floats that
// the outputs' sums are multiplied with. The last band is whole.
constexpr std::int64_t ROUNDED = -1, ROUNDED_UNIT = 4, BAND = 16;

// Like longdraft_linear, for matrices that are all rounded. A row's result does not depend on the rows beside it.
void rounded_linear(const float *x, std::int64_t rows, std::int64_t size, const Matrix *matrices, std::int64_t count,
                    int threads);

// The format of a Matrix in bands of 16 outputs too, `w_row` bytes each, in blocks of 32 inputs, zeros behind the last: for
// four inputs after the other 32 bytes, an output's two beside one another, the numbers of the first two inputs in the lower
// four bits and of the second two in the upper; then the outputs' scales, then what a number of 0 stands for, as bfloat16.
constexpr std::int64_t NIBBLED = -2, NIBBLED_BLOCK = 32, NIBBLED_BYTES = 20 * BAND;

// Like rounded_linear, for matrices that all have four bits.
void nibbled_linear(const float *x, std::int64_t rows, std::int64_t size, const Matrix *matrices, std::int64_t count,
                    int threads);
