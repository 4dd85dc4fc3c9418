// Products of rounded numbers, for drafts.
#pragma once

#include "kernels.h"

// The format of a Matrix whose rows are numbers of eight bits, zeros up to a multiple of ROUNDED_UNIT, and a float that
// they are multiplied with.
constexpr std::int64_t ROUNDED = -1, ROUNDED_UNIT = 32;

// As longdraft_linear, of matrices that are all rounded. A row of x gets the same result whoever its neighbours are.
void rounded_linear(const float *x, std::int64_t rows, std::int64_t size, const Matrix *matrices, std::int64_t count,
                    int threads);
