// Products of rows with several matrices, also with those of the experts that rows are routed to: one loop for the threads, in
// which each matrix is read once.
#include "products.h"

#include "parts.h"
#include "tiles.h"

#include <algorithm>
#include <vector>

using std::int64_t;

namespace {

// Outputs that a thread takes at a time: in floats (whole tiles of every shape), rounded for up to TOGETHER rows and for more, and of
// a prompt.
constexpr int64_t FLOATS = 24, FEW = 2 * INT8_UNIT, MANY = 8 * INT8_UNIT, PROMPT = 16 * INT8_UNIT;

// what(matrix, its number, from, to) for all outputs of some matrices, `share` at a time.
template <typename What>
void share_outputs(int64_t share, const Matrix *matrices, int64_t count, int threads, const What &what) {
  const auto shares_of = [=](const Matrix &m) { return (m.outs + share - 1) / share; };
  int64_t shares = 0;
  for (int64_t i = 0; i < count; i++) shares += shares_of(matrices[i]);
  share_out(threads, shares, [&](int64_t number) {
    const Matrix *m = matrices;
    for (; number >= shares_of(*m); m++) number -= shares_of(*m);
    what(*m, m - matrices, number * share, std::min(m->outs, (number + 1) * share));
  });
}

// Which of two ways in which rows are rounded a matrix needs.
int64_t way_of(const Matrix &m) { return int8_pieces(m.format) > 1; }

// Rows of x, rounded in one way: those of each group.
struct Rounded {
  std::vector<Int8Rows> groups;
  Scratch of_numbers, of_blocks;

  void round(const float *x, int64_t size, int64_t pieces, const int64_t *starts, int64_t count, int threads) {
    groups.clear();
    int64_t room = 0;
    for (int64_t g = 0; g < count; g++) {
      groups.push_back(int8_rows(starts[g + 1] - starts[g], size, pieces));
      room += groups[g].room();
    }
    auto *numbers = reinterpret_cast<std::int8_t *>(of_numbers.of(room * size / 4));
    auto *blocks = reinterpret_cast<Int8Rows::Block *>(of_blocks.of(room * (size / 32) * sizeof(Int8Rows::Block) / 4));
    for (Int8Rows &group : groups) {
      group.numbers = numbers;
      group.blocks = blocks;
      numbers += group.room() * size;
      blocks += group.room() * (size / 32);
    }
    const Int8Rows *own = groups.data();
    share_out(threads, count, [=](int64_t g) { round_rows(x + starts[g] * size, own[g], count > 1 ? 1 : threads); });
  }
};

// Room for rows in bfloat16.
BriefRows brief_rows(int64_t rows, int64_t size, Scratch &scratch) {
  BriefRows brief{nullptr, rows, size};
  brief.numbers = reinterpret_cast<Brief *>(scratch.of(brief.room() * size / 2));
  return brief;
}

// All rows of a prompt times several matrices, those in blocks by tiles.
void multiply_prompt(const float *x, const BriefRows &brief, const Matrix *matrices, int64_t count, int threads) {
  share_outputs(PROMPT, matrices, count, threads, [&](const Matrix &m, int64_t, int64_t from, int64_t to) {
    if (m.int8) return brief_outputs(brief, m, from, to);
    float_outputs(x, brief.rows, brief.size, m, from, to);
  });
}

// Rows [starts[g], starts[g + 1]) of x times matrices [g * each, (g + 1) * each), for each of `count` groups of rows.
void multiply(const float *x, int64_t size, const Matrix *matrices, int64_t each, const int64_t *starts, int64_t count,
              int threads) {
  const Matrix *end = matrices + count * each;
  int64_t most = 0;
  for (int64_t g = 0; g < count; g++) most = std::max(most, starts[g + 1] - starts[g]);
  static thread_local Rounded ways[2];
  bool rounds = false, tiles = false;
  for (int64_t way = 0; way < 2; way++) {
    const auto needed = [=](const Matrix &m) { return m.int8 && way_of(m) == way; };
    const Matrix *first = std::find_if(matrices, end, needed);
    if (first == end) continue;
    ways[way].round(x, size, int8_pieces(first->format), starts, count, threads);
    rounds = true;
    for (const Int8Rows &group : ways[way].groups) tiles = tiles || group.lines;
  }
  const Int8Rows *rounded[] = {ways[0].groups.data(), ways[1].groups.data()};  // the calling thread's
  const int64_t share = !rounds ? FLOATS : most <= Int8Rows::TOGETHER && !tiles ? FEW : MANY;
  share_outputs(share, matrices, count * each, threads, [&](const Matrix &m, int64_t number, int64_t from, int64_t to) {
    const int64_t g = number / each;
    if (m.int8) return int8_outputs(rounded[way_of(m)][g], m, from, to);
    float_outputs(x + starts[g] * size, starts[g + 1] - starts[g], size, m, from, to);
  });
}

}  // namespace

void multiply_gated(const float *x, int64_t rows, int64_t size, const Matrix &gate, const Matrix &up, bool by_gelu,
                    const Matrix &down, bool prompt, int threads) {
  static thread_local Scratch of_x, of_inner, floats;
  if (TILES && prompt && gate.int8 && up.int8 && down.int8 && gate.format == up.format) {
    const BriefRows brief = brief_rows(rows, size, of_x), inner = brief_rows(rows, gate.outs, of_inner);
    round_rows(x, brief, threads);
    share_outputs(PROMPT, &gate, 1, threads, [&](const Matrix &, int64_t, int64_t from, int64_t to) {
      brief_outputs(brief, gate, up, by_gelu, from, to, inner);
    });
    return multiply_prompt(nullptr, inner, &down, 1, threads);
  }
  const int64_t apart = Scratch::whole_lines(rows * gate.outs);
  float *y = floats.of(2 * apart), *other = y + apart;
  const Matrix both[] = {into(gate, y, false), into(up, other, false)};
  must(longdraft_linear(x, rows, size, both, 2, prompt, threads));
  gated(y, other, rows, gate.outs, threads, by_gelu);
  must(longdraft_linear(y, rows, gate.outs, &down, 1, prompt, threads));
}

Code longdraft_linear(const float *x, int64_t rows, int64_t size, const Matrix *matrices, int64_t count, int64_t prompt,
                      int threads) try {
  if (TILES && prompt && std::any_of(matrices, matrices + count, [](const Matrix &m) { return m.int8; })) {
    static thread_local Scratch numbers;
    const BriefRows brief = brief_rows(rows, size, numbers);
    round_rows(x, brief, threads);
    multiply_prompt(x, brief, matrices, count, threads);
    return DONE;
  }
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
