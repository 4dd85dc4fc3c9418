// Products of rounded numbers, for drafts.
#pragma once

#include "kernels.h"

// The format of a Matrix in bands of 16 outputs, `w_row` bytes each: for two inputs after the other the outputs' numbers
// of eight bits, an output's two beside one another, zeros up to a multiple of ROUNDED_UNIT inputs; then the floats that
// the outputs' sums are multiplied with. The last band is whole.
constexpr std::int64_t ROUNDED = -1, ROUNDED_UNIT = 4, BAND = 16;

// As longdraft_linear, of matrices that are all rounded. A row of x gets the same result whoever its neighbours are.
void rounded_linear(const float *x, std::int64_t rows, std::int64_t size, const Matrix *matrices, std::int64_t count,
                    int threads);
