// y = x W^T + b of a prompt's rows in bfloat16: both sides are rounded to it, and tiles of AMX add products in float32 (brief.h).
//
// Rows and outputs are taken 32 at a time, in two tiles each. Weights are unpacked some hundred inputs at a time, and meet many rows
// while they are in the first-level cache. Between an MLP's products rows stay in bfloat16: what lies between them is as large as
// all else that a layer reads and writes.
#include "brief.h"
#include "outputs.h"
#include "parts.h"
#include "products.h"

#include <type_traits>

#if defined(LONGDRAFT_AMX)
namespace {

using brief::DEEP;
using brief::SIDE;

constexpr int64_t EACH = BriefRows::TOGETHER;
constexpr int64_t DEPTH = 8 * DEEP;  // inputs that are unpacked at a time
constexpr int64_t ROWS = 512;        // their numbers and sums stay in the second-level cache while outputs pass
constexpr int64_t SUMS = EACH * EACH, TILE_SUMS = SIDE * SIDE;

// Two floats in a lane, rounded to the nearest, as bfloat16.
INLINED inline ivec paired(vec a, vec b) {
  const auto bits = [](vec x) INLINED { return (__m512i)((ivec)x + 0x8000); };
  return (ivec)_mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(bits(a), 16), bits(b));
}

// Blocks of LANES outputs, as every other of the right sides of products (DEEP / 2, SIDE) that lie one behind the other. next: what
// is read next, to be prefetched.
template <typename F>
void unpack(Woven in, int64_t size, const byte *next, ivec *to) {
  constexpr int64_t BYTES = F::BYTES * LANES * PIECE / F::WEIGHTS;  // of a piece
  const byte *wanted = next;
  for (int64_t i = 0; i < size; i += F::WEIGHTS, in = in.at(F::BYTES), to += F::WEIGHTS) {
    F::block(in, [&](int piece, const auto &w, const auto *scale, const vec *least) INLINED {
      for (wanted += BYTES; next < wanted; next += 64) __builtin_prefetch(next, 0, 2);
      UNROLLED for (int s = 0; s < F::SCALES; s++) {
        // A byte in the upper bits behind 256's exponent is 256 more.
        const vec by = scale[s], from = (F::LEAST ? least[s] : vec{}) - by * (256.0f + F::ZERO);
        const auto float_of = [=](ivec at) INLINED { return fused((vec)((at & 0x7f8000) | 0x43800000), by, from); };
        constexpr int COLUMNS = COLUMNS_OF_PIECE / F::SCALES;
        UNROLLED for (int c = s * COLUMNS; c < (s + 1) * COLUMNS; c++) {
          const ivec four = listed<F>(w(c));
          to[2 * piece * SIDE + 2 * c] = paired(float_of(four << 15), float_of(four << 7));
          to[2 * piece * SIDE + 2 * c + 1] = paired(float_of(four >> 1), float_of(four >> 9));
        }
      }
    });
  }
}

// sums (two tiles of rows, two of outputs) become, or grow by, x times w, `count` pairs of tiles of both.
void multiply(const Brief *x, const ivec *w, int64_t count, float *sums, bool adds) {
  if (adds) {
    with_each<4>([=](auto tile) INLINED { tiles::load<tile.value>(sums + tile.value * TILE_SUMS); });
  } else {
    tiles::zero<0, 4>();
  }
  for (int64_t k = 0; k < count; k++, x += EACH * DEEP, w += 2 * SIDE) {
    tiles::load<4>(x);
    tiles::load<6>(w);
    tiles::add_brief_products<0, 4, 6>();
    tiles::load<7>(w + SIDE);
    tiles::add_brief_products<1, 4, 7>();
    tiles::load<5>(x + SIDE * DEEP);
    tiles::add_brief_products<2, 5, 6>();
    tiles::add_brief_products<3, 5, 7>();
  }
  with_each<4>([=](auto tile) INLINED { tiles::store<tile.value>(sums + tile.value * TILE_SUMS); });
}

// Where the sums of 32 outputs of a row lie, in two tiles.
const float *sums_of_row(const float *sums, int64_t row) { return sums + row / SIDE * 2 * TILE_SUMS + row % SIDE * SIDE; }

// A matrix whose outputs become floats: those of the pair at `out`, of rows [row, row + rows), once all inputs are in their sums.
struct Floats {
  const Matrix *matrices[1];

  void await(int64_t out, int64_t row, int64_t rows) const {
    const Matrix &m = *matrices[0];
    for (int64_t r = row; r < row + rows; r++) {
      for (int64_t o = out; o < std::min(m.outs, out + EACH); o += LANES) __builtin_prefetch(m.y + r * m.outs + o, 1);
    }
  }

  void finish(int64_t out, int64_t row, int64_t rows, const float *sums, int64_t) const {
    const Matrix &m = *matrices[0];
    for (int64_t b = 0; b < 2 && out + b * LANES < m.outs; b++) {
      const Outputs outputs(m, out + b * LANES);
      for (int64_t i = 0; i < rows; i++) outputs.finish(m, row + i, load(sums_of_row(sums, i) + b * TILE_SUMS));
    }
  }
};

// An MLP's gate and other side, whose outputs become the rows that its last product reads.
struct Gated {
  const Matrix *matrices[2];
  const bool by_gelu;
  const BriefRows &to;

  void await(int64_t, int64_t, int64_t) const {}

  void finish(int64_t out, int64_t row, int64_t, const float *sums, int64_t apart) const {
    const auto output = [=](int turn, int64_t i, int b) INLINED {
      const vec sum = load(sums_of_row(sums + turn * apart, i) + b * TILE_SUMS);
      const float *bias = matrices[turn]->bias;
      return bias ? sum + load(bias + out + b * LANES) : sum;
    };
    const auto number = [=](int64_t i, int b) INLINED {
      const vec x = output(0, i, b);
      return (by_gelu ? gelu(x) : silu(x)) * output(1, i, b);
    };
    Brief *numbers = to.numbers + row * to.size + out * EACH;
    for (int64_t i = 0; i < EACH; i++, numbers += DEEP) {
      const ivec both = brief::rounded(number(i, 0), number(i, 1));
      std::memcpy(numbers, &both, sizeof both);
    }
  }
};

// Outputs [from, to) of one matrix for all rows, or of two by turns; the sums of a pair of the second lie `apart` behind the first's.
template <typename F, typename Done>
void outputs_of(const BriefRows &x, int64_t from, int64_t to, const Done &done) {
  constexpr int64_t TURNS = std::extent_v<decltype(done.matrices)>;
  static thread_local Scratch of_sums, of_weights, copies;
  ivec *w = reinterpret_cast<ivec *>(of_weights.of(EACH * DEPTH / 2));
  const tiles::Shapes shapes;
  const int64_t pairs = TURNS * ((to - from + EACH - 1) / EACH);
  for (int64_t row = 0; row < x.rows; row += ROWS) {
    const int64_t end = std::min(x.rows, row + ROWS), groups = (end - row + EACH - 1) / EACH;
    const int64_t apart = groups * SUMS;
    float *sums = of_sums.of(pairs * apart);
    for (int64_t first = 0; first < x.size; first += DEPTH) {
      const int64_t depth = std::min(DEPTH, x.size - first);
      const bool last = first + depth == x.size;
      for (int64_t pair = 0; pair < pairs; pair++) {
        const Matrix &m = *done.matrices[pair % TURNS];
        const int64_t out = from + pair / TURNS * EACH;
        const bool ends = last && pair % TURNS == TURNS - 1;
        for (int b = 0; b < 2; b++) {
          const Outputs outputs(m, out + b * LANES);
          const byte *next = outputs.first(m) + EACH * m.w_row + LANES * (first / F::WEIGHTS * F::BYTES);
          unpack<F>(outputs.woven<F>(m, first, depth, copies), depth, next, w + b * SIDE);
        }
        const Brief *numbers = x.numbers + row * x.size + first * EACH;
        float *own = sums + pair * apart;
        for (int64_t r = row; r < end; r += EACH, numbers += EACH * x.size, own += SUMS) {
          if (ends) done.await(out, r, std::min(EACH, end - r));
          multiply(numbers, w, depth / DEEP, own, first > 0);
          if (ends) done.finish(out, r, std::min(EACH, end - r), own - (TURNS - 1) * apart, apart);
        }
      }
    }
  }
}

}  // namespace

void round_rows(const float *x, const BriefRows &to, int threads) {
  share_out(threads, to.room() / EACH, [=](int64_t group) {
    for (int64_t r = group * EACH; r < (group + 1) * EACH; r++) {
      Brief *numbers = to.numbers + group * EACH * to.size + r % EACH * DEEP;
      for (int64_t i = 0; i < to.size; i += DEEP, numbers += EACH * DEEP) {
        const float *from = x + r * to.size + i;
        const ivec both = r < to.rows ? brief::rounded(load(from), load(from + SIDE)) : ivec{};
        std::memcpy(numbers, &both, sizeof both);
      }
    }
  });
}

void brief_outputs(const BriefRows &x, const Matrix &m, int64_t from, int64_t to) {
  in_blocks(m.format, [&](auto f) { outputs_of<decltype(f)>(x, from, to, Floats{{&m}}); });
}

void brief_outputs(const BriefRows &x, const Matrix &gate, const Matrix &up, bool by_gelu, int64_t from, int64_t to,
                   const BriefRows &y) {
  in_blocks(gate.format, [&](auto f) { outputs_of<decltype(f)>(x, from, to, Gated{{&gate, &up}, by_gelu, y}); });
}
#else
void round_rows(const float *, const BriefRows &, int) {}
void brief_outputs(const BriefRows &, const Matrix &, std::int64_t, std::int64_t) {}
void brief_outputs(const BriefRows &, const Matrix &, const Matrix &, bool, std::int64_t, std::int64_t, const BriefRows &) {}
#endif
