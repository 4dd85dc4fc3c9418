// Products in floats, of a part of a matrix's outputs.
#pragma once

#include "kernels.h"

// The format of a float32 Matrix (size, outs): `w_row` bytes from one input's weights to the next's.
constexpr std::int64_t BY_INPUT = -1;

// Outputs [from, to) of a matrix for all rows of x. A row's result does not depend on the rows beside it.
void float_outputs(const float *x, std::int64_t rows, std::int64_t size, const Matrix &m, std::int64_t from, std::int64_t to);
