// Splits a product into shares of outputs for threads, and into tiles of a few rows and outputs whose sums stay in registers.
#pragma once

#include "kernels.h"
#include "threads.h"

#include <algorithm>
#include <cstdint>

// The rows of x of a tile, from `row` on, and the number of this group among all groups.
struct Group {
  std::int64_t row, number, groups;
};

template <int R, int O, typename Product>
inline void tile_of(std::int64_t rows, const Product &product, const Matrix &m, std::int64_t out, Group group) {
  if (rows == R) return product.template tile<R, O>(m, out, group);
  if constexpr (R > 1) tile_of<R - 1, O>(rows, product, m, out, group);
}

// Outputs [from, to) of all rows, at most R rows and O outputs at a time: a few rows of W are multiplied with all rows of x, then
// the next few. A Product defines its unit of outputs; it has `rows`, and tile<R, O>(m, out, group).
template <int R, int O, typename Product>
void outputs(const Product &product, const Matrix &m, std::int64_t from, std::int64_t to) {
  const std::int64_t groups = (product.rows + R - 1) / R;
  const std::int64_t whole = from + (to - from) / O * O;
  for (std::int64_t out = from; out < whole; out += O) {
    for (std::int64_t g = 0, row = 0; g < groups; g++) {
      const std::int64_t end = product.rows * (g + 1) / groups;
      tile_of<R, O>(end - row, product, m, out, {row, g, groups});
      row = end;
    }
  }
  if constexpr (O > 1) {
    if (whole < to) outputs<R, 1>(product, m, whole, to);
  }
}

// Runs what(m, from, to) for all outputs of several matrices on several threads, at most SHARE of one matrix at a time.
template <std::int64_t SHARE, typename What>
void share_outputs(const Matrix *matrices, std::int64_t count, int threads, const What &what) {
  const auto shares_of = [](const Matrix &m) { return (m.outs + SHARE - 1) / SHARE; };
  std::int64_t shares = 0;
  for (std::int64_t i = 0; i < count; i++) shares += shares_of(matrices[i]);
  share_out(threads, shares, [&](std::int64_t number) {
    const Matrix *m = matrices;
    for (; number >= shares_of(*m); m++) number -= shares_of(*m);
    what(*m, number * SHARE, std::min(m->outs, (number + 1) * SHARE));
  });
}
