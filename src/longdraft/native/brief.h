// Products of bfloat16 in tiles of AMX, which attention uses where keys and values are bfloat16: (rows, depth) times (depth, columns).
//
// Both sides are rounded to bfloat16; 32 products at a time are added in float32, in an order of the processor's. Rows do not
// meet, so a row's bits depend neither on the rows beside it nor on their number. A product with 0 changes no sum.
#pragma once

#include "stored.h"
#include "tiles.h"

#include <algorithm>

#if defined(LONGDRAFT_AMX)

namespace brief {

using std::int64_t;

constexpr int64_t DEEP = 32, SIDE = 16;  // numbers of a row in a tile; its rows, and its columns

inline int64_t whole(int64_t n, int64_t part) { return (n + part - 1) / part * part; }

// Thirty-two numbers, a's before b's.
inline ivec rounded(vec a, vec b) {
  ivec both;
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(both) : "v"(b), "v"(a));
  return both;
}

// Rows of floats (rows, columns), each `row` behind the one before, to (rows, depth); zeros behind the columns, which are a multiple
// of 16.
inline void round_rows(const float *x, int64_t row, int64_t rows, int64_t columns, float scale, int64_t depth, Brief *to) {
  for (int64_t r = 0; r < rows; r++, x += row, to += depth) {
    for (int64_t j = 0; j < depth; j += DEEP) {
      const vec a = j < columns ? load(x + j) * scale : vec{}, b = j + SIDE < columns ? load(x + j + SIDE) * scale : vec{};
      const ivec both = rounded(a, b);
      std::memcpy(to + j, &both, sizeof both);
    }
  }
}

// The right side of a product, (depth / 2, width): in a lane a column's numbers of two rows. row_of(i): row i of bfloat16, of
// which `columns` are read, or null for zeros. ahead: what is prefetched, so many numbers behind each row.
template <typename RowOf>
inline void pair_rows(const RowOf &row_of, int64_t depth, int64_t columns, int64_t width, int64_t ahead, ivec *to) {
  alignas(64) std::int16_t order[2 * SIDE];
  for (int i = 0; i < 2 * SIDE; i++) order[i] = static_cast<std::int16_t>(i / 2 + i % 2 * SIDE);
  const __m512i places = _mm512_load_si512(order);
  const auto paired = [=](__m256i a, __m256i b) INLINED {
    return (ivec)_mm512_permutexvar_epi16(places, _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1));
  };
  const auto some = [=](const Brief *row, int64_t c) {
    const int64_t count = row ? std::clamp<int64_t>(columns - c, 0, SIDE) : 0;
    return _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1 << count) - 1), row + c);
  };
  for (int64_t i = 0; i < depth; i += 2, to += width / SIDE) {
    const Brief *first = row_of(i), *second = row_of(i + 1);
    int64_t c = 0;
    for (; first && second && c + DEEP <= columns; c += DEEP) {
      to[c / SIDE] = paired(sixteen_shorts(first + c), sixteen_shorts(second + c));
      to[c / SIDE + 1] = paired(sixteen_shorts(first + c + SIDE), sixteen_shorts(second + c + SIDE));
      if (!ahead) continue;
      __builtin_prefetch(first + ahead + c, 0, 2);
      __builtin_prefetch(second + ahead + c, 0, 2);
    }
    for (; c < width; c += SIDE) to[c / SIDE] = paired(some(first, c), some(second, c));
  }
}

// A x B tiles of sums, two of each at most.
template <int A, int B>
inline void multiply_tiles(const Brief *left, int64_t depth, const ivec *right, int64_t width, float *sums, int64_t row, bool adds) {
  const int64_t sum_line = 4 * row, left_line = 2 * depth, right_line = 4 * width;
  const auto each_sum = [&](const auto &what) INLINED {
    with_each<A * B>([&](auto tile) INLINED { what(tile, sums + tile.value / B * SIDE * row + tile.value % B * SIDE); });
  };
  if (adds) {
    each_sum([=](auto tile, float *at) INLINED { tiles::load<tile.value>(at, sum_line); });
  } else {
    tiles::zero<0, A * B>();
  }
  for (int64_t k = 0; k < depth; k += DEEP, left += DEEP, right += width) {
    tiles::load<4>(left, left_line);
    if constexpr (A > 1) tiles::load<5>(left + SIDE * depth, left_line);
    with_each<B>([&](auto b) INLINED {
      tiles::load<6 + b.value>(right + b.value, right_line);
      tiles::add_brief_products<b.value, 4, 6 + b.value>();
      if constexpr (A > 1) tiles::add_brief_products<B + b.value, 5, 6 + b.value>();
    });
  }
  each_sum([=](auto tile, float *at) INLINED { tiles::store<tile.value>(at, sum_line); });
}

// sums (rows, width), each `row` behind the one before, become left (rows, depth) times right (pairs of `depth` rows, width), or
// grow by it. rows, width: multiples of SIDE; depth: of DEEP.
inline void multiply(const Brief *left, int64_t rows, int64_t depth, const ivec *right, int64_t width, float *sums, int64_t row,
                     bool adds) {
  for (int64_t r = 0; r < rows; r += 2 * SIDE) {
    for (int64_t c = 0; c < width; c += 2 * SIDE) {
      with_number<2>(std::min<int64_t>(2, (rows - r) / SIDE), [&](auto A) {
        with_number<2>(std::min<int64_t>(2, (width - c) / SIDE), [&](auto B) {
          multiply_tiles<A.value, B.value>(left + r * depth, depth, right + c / SIDE, width, sums + r * row + c, row, adds);
        });
      });
    }
  }
}

// The room of a thread for the left and the right side of a product.
struct Room {
  Brief *left;
  ivec *right;

  Room(int64_t rows, int64_t depth, int64_t width) {
    static thread_local Scratch scratch;
    float *place = scratch.of(depth / 2 * (whole(rows, SIDE) + width));
    left = reinterpret_cast<Brief *>(place);
    right = reinterpret_cast<ivec *>(place + depth / 2 * whole(rows, SIDE));
  }
};

// Rows of queries (rows, d), scaled, in whole tiles (whole(rows, SIDE), whole(d, DEEP)).
inline void round_queries(const float *q, int64_t rows, int64_t d, float scale, Brief *to) {
  const int64_t depth = whole(d, DEEP);
  round_rows(q, d, rows, d, scale, depth, to);
  std::fill(to + rows * depth, to + whole(rows, SIDE) * depth, Brief{});
}

// s (rows, `row`) of queries as rounded above: scores of keys, of which dimension i lies at kt + i * k_dim; as many keys behind
// them are prefetched as a row of s has.
inline void score(const Brief *q, int64_t rows, int64_t d, const Brief *kt, int64_t k_dim, int64_t keys, float *s, int64_t row) {
  const int64_t depth = whole(d, DEEP), width = whole(keys, SIDE);
  const Room room(0, depth, width);
  pair_rows([=](int64_t i) { return i < d ? kt + i * k_dim : nullptr; }, depth, keys, width, row, room.right);
  multiply(q, whole(rows, SIDE), depth, room.right, width, s, row, false);
}

// out (rows, d) += weights p (rows, `row`) times values of keys [from, keys), in groups whose borders do not depend on `from`.
inline void mix(const float *p, int64_t row, int64_t rows, const Brief *v, int64_t v_row, int64_t from, int64_t keys, int64_t d,
                float *out) {
  const int64_t first = from / DEEP * DEEP, depth = whole(keys - first, DEEP);
  const Room room(rows, depth, d);
  round_rows(p + first, row, rows, whole(keys - first, SIDE), 1, depth, room.left);
  const auto row_of = [=](int64_t i) { return first + i >= from && first + i < keys ? v + (first + i) * v_row : nullptr; };
  pair_rows(row_of, depth, d, d, row * v_row, room.right);
  multiply(room.left, whole(rows, SIDE), depth, room.right, d, out, d, true);
}

}  // namespace brief
#endif
