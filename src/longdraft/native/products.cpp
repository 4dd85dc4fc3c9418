// Products of rows with several matrices, also with those of the experts that rows are routed to: one loop for the threads, in
// which each matrix is read once.
#include "products.h"

#include "threads.h"
#include "vectors.h"

#include <algorithm>
#include <vector>

using std::int64_t;

namespace {

// Outputs that a thread takes at a time: in floats (whole tiles of every shape), rounded for up to TOGETHER rows, and for more.
constexpr int64_t FLOATS = 24, FEW = 2 * INT8_UNIT, MANY = 8 * INT8_UNIT;

// Rows [starts[g], starts[g + 1]) of x times matrices [g * each, (g + 1) * each), for each of `count` groups of rows.
void multiply(const float *x, int64_t size, const Matrix *matrices, int64_t each, const int64_t *starts, int64_t count,
              int threads) {
  static thread_local Scratch of_numbers, of_blocks;
  static thread_local std::vector<Int8Rows> of_groups;
  const Matrix *end = matrices + count * each;
  const bool rounds = std::any_of(matrices, end, [](const Matrix &m) { return m.int8; });
  of_groups.clear();
  int64_t most = 0, room = 0;
  for (int64_t g = 0; g < count; g++) {
    of_groups.push_back({nullptr, nullptr, starts[g + 1] - starts[g], size});
    most = std::max(most, of_groups[g].rows);
    room += of_groups[g].room();
  }
  Int8Rows *groups = of_groups.data();  // the calling thread's
  if (rounds) {
    auto *numbers = reinterpret_cast<std::int8_t *>(of_numbers.of(room * size / 4));
    auto *blocks = reinterpret_cast<Int8Rows::Block *>(of_blocks.of(room * (size / 32) * sizeof(Int8Rows::Block) / 4));
    for (Int8Rows *group = groups; group < groups + count; group++) {
      group->numbers = numbers;
      group->blocks = blocks;
      numbers += group->room() * size;
      blocks += group->room() * (size / 32);
    }
    share_out(threads, count, [&](int64_t g) { round_rows(x + starts[g] * size, groups[g], count > 1 ? 1 : threads); });
  }
  const int64_t share = !rounds ? FLOATS : most <= Int8Rows::TOGETHER ? FEW : MANY;
  const auto shares_of = [=](const Matrix &m) { return (m.outs + share - 1) / share; };
  int64_t shares = 0;
  for (const Matrix *m = matrices; m < end; m++) shares += shares_of(*m);
  share_out(threads, shares, [&](int64_t number) {
    const Matrix *m = matrices;
    for (; number >= shares_of(*m); m++) number -= shares_of(*m);
    const int64_t g = (m - matrices) / each, from = number * share, to = std::min(m->outs, from + share);
    if (m->int8) return int8_outputs(groups[g], *m, from, to);
    float_outputs(x + starts[g] * size, groups[g].rows, size, *m, from, to);
  });
}

}  // namespace

Code longdraft_linear(const float *x, int64_t rows, int64_t size, const Matrix *matrices, int64_t count, int threads) try {
  const int64_t starts[] = {0, rows};
  multiply(x, size, matrices, count, starts, 1, threads);
  return DONE;
} CATCH_NO_MEMORY

Code longdraft_experts(const float *x, int64_t size, const Matrix *matrices, int64_t each, const int64_t *experts,
                       const int64_t *starts, int64_t count, float *y, int threads) try {
  std::vector<Matrix> products;
  for (int64_t g = 0; g < count; g++) {
    float *out = y;
    for (int64_t i = 0; i < each; i++) {
      Matrix m = matrices[experts[g] * each + i];
      m.y = out + starts[g] * m.outs;
      out += starts[count] * m.outs;
      products.push_back(m);
    }
  }
  multiply(x, size, products.data(), each, starts, count, threads);
  return DONE;
} CATCH_NO_MEMORY

int longdraft_lanes() { return LANES; }

void longdraft_threads(Parallel entry) { parallel_entry = entry; }
