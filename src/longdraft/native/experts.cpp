// Products of rows with the matrices of the experts that they are routed to.
//
// A verification's rows choose some of many matrices, each for a few rows. All of them are one loop for the threads, and each is
// read once.
#include "int8.h"
#include "kernels.h"
#include "outputs.h"
#include "threads.h"
#include "tiles.h"
#include "vectors.h"

#include <algorithm>
#include <vector>

using std::int64_t;

namespace {

constexpr int64_t FEW = 32, MANY = 128;  // outputs that a thread takes at a time, for up to eight rows and for more
constexpr int64_t TOGETHER = 8;

}  // namespace

Code longdraft_experts(const float *x, int64_t size, const Matrix *matrices, int64_t each, const int64_t *experts,
                       const int64_t *starts, int64_t count, float *y, int threads) try {
  static thread_local Scratch of_numbers, of_blocks;
  const int64_t rows = starts[count];
  std::vector<Matrix> products;
  std::vector<Int8Rows> rounded;
  products.reserve(count * each);
  rounded.reserve(count);
  int64_t most = 0, room = 0;
  bool rounds = false;
  for (int64_t g = 0; g < count; g++) {
    const int64_t own = starts[g + 1] - starts[g];
    float *out = y;
    for (int64_t i = 0; i < each; i++) {
      Matrix m = matrices[experts[g] * each + i];
      m.y = out + starts[g] * m.outs;
      out += rows * m.outs;
      rounds = rounds || m.int8;
      products.push_back(m);
    }
    most = std::max(most, own);
    room += int8_room(own);
  }
  if (rounds) {
    auto *numbers = reinterpret_cast<std::int8_t *>(of_numbers.of(room * size / 4));
    auto *blocks = reinterpret_cast<Int8Rows::Block *>(of_blocks.of(room * (size / 32) * sizeof(Int8Rows::Block) / 4));
    for (int64_t g = 0; g < count; g++) {
      const int64_t own = starts[g + 1] - starts[g], place = int8_room(own);
      rounded.push_back({numbers, blocks, own, size});
      numbers += place * size;
      blocks += place * (size / 32);
    }
    share_out(threads, count, [&](int64_t g) { int8_rows_in(x + starts[g] * size, rounded[g], 1); });
  }
  const auto compute = [&](const Matrix &m, int64_t from, int64_t to) {
    const int64_t g = (&m - products.data()) / each;
    if (m.int8) return int8_outputs(rounded[g], m, from, to);
    float_outputs(x + starts[g] * size, starts[g + 1] - starts[g], size, m, from, to);
  };
  const auto number = static_cast<int64_t>(products.size());
  if (most <= TOGETHER) return share_outputs<FEW>(products.data(), number, threads, compute), DONE;
  share_outputs<MANY>(products.data(), number, threads, compute);
  return DONE;
} CATCH_NO_MEMORY
