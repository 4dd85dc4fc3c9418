// Matrix products in bfloat16 on AMX, for attention to a bfloat16 KV cache: (rows, depth) times (depth, columns).
//
// tdpbf16ps adds 32 products at a time in float32, in an unspecified order. Rows of a tile are independent, so a row's bits depend
// neither on the other rows nor on their number. Padding by zeros does no harm: a product with 0 changes no sum.
#pragma once

#include "packed_rows.h"
#include "amx.h"

#include <algorithm>

#if defined(LONGDRAFT_AMX)

namespace bf16 {

using std::int64_t;

constexpr int64_t TILE_DEPTH = 32, TILE_SIDE = 16;  // of a tile: bfloat16 numbers of a row; rows, and columns of sums

inline int64_t round_up(int64_t n, int64_t part) { return (n + part - 1) / part * part; }

// Rounds 32 floats to bfloat16, first those of a, then those of b (vcvtne2ps2bf16).
inline ivec round_to_bf16(vec a, vec b) {
  ivec pair;
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(pair) : "v"(b), "v"(a));
  return pair;
}

// to (rows, depth) = bfloat16(x * scale), x (rows, columns) with the stride `row`, padded by zeros; columns is a multiple of 16.
inline void round_matrix(const float *x, int64_t row, int64_t rows, int64_t columns, float scale, int64_t depth, BFloat16 *to) {
  for (int64_t r = 0; r < rows; r++, x += row, to += depth) {
    for (int64_t j = 0; j < depth; j += TILE_DEPTH) {
      const vec a = j < columns ? load(x + j) * scale : vec{}, b = j + TILE_SIDE < columns ? load(x + j + TILE_SIDE) * scale : vec{};
      const ivec pair = round_to_bf16(a, b);
      std::memcpy(to + j, &pair, sizeof pair);
    }
  }
}

// Writes the right operand in AMX's layout (VNNI): (depth / 2, width) lanes, each with a column's elements of two consecutive rows.
// row_ptr(i): row i, of which `columns` elements are read, or null for zeros. Prefetches what lies prefetch_distance elements later.
template <typename RowPtr>
inline void interleave_row_pairs(const RowPtr &row_ptr, int64_t depth, int64_t columns, int64_t width, int64_t prefetch_distance,
                                 ivec *to) {
  alignas(64) std::int16_t order[2 * TILE_SIDE];
  for (int i = 0; i < 2 * TILE_SIDE; i++) order[i] = static_cast<std::int16_t>(i / 2 + i % 2 * TILE_SIDE);
  const __m512i permutation = _mm512_load_si512(order);
  const auto interleave = [=](__m256i a, __m256i b) ALWAYS_INLINE {
    return (ivec)_mm512_permutexvar_epi16(permutation, _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1));
  };
  const auto load_masked = [=](const BFloat16 *row, int64_t c) {
    const int64_t count = row ? std::clamp<int64_t>(columns - c, 0, TILE_SIDE) : 0;
    return _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1 << count) - 1), row + c);
  };
  for (int64_t i = 0; i < depth; i += 2, to += width / TILE_SIDE) {
    const BFloat16 *first = row_ptr(i), *second = row_ptr(i + 1);
    int64_t c = 0;
    for (; first && second && c + TILE_DEPTH <= columns; c += TILE_DEPTH) {
      to[c / TILE_SIDE] = interleave(load_16_shorts(first + c), load_16_shorts(second + c));
      to[c / TILE_SIDE + 1] = interleave(load_16_shorts(first + c + TILE_SIDE), load_16_shorts(second + c + TILE_SIDE));
      if (!prefetch_distance) continue;
      prefetch<2>(address_of(first + c) + 2 * prefetch_distance);
      prefetch<2>(address_of(second + c) + 2 * prefetch_distance);
    }
    for (; c < width; c += TILE_SIDE) to[c / TILE_SIDE] = interleave(load_masked(first, c), load_masked(second, c));
  }
}

// multiply() for A x B tiles of sums, A and B at most 2.
template <int A, int B>
inline void multiply_tiles(const BFloat16 *lhs, int64_t depth, const ivec *rhs, int64_t width, float *sums, int64_t row,
                           bool accumulate) {
  const int64_t sums_stride = 4 * row, lhs_stride = 2 * depth, rhs_stride = 4 * width;
  const auto for_each_sum = [&](const auto &f) ALWAYS_INLINE {
    static_for<A * B>([&](auto tile) ALWAYS_INLINE { f(tile, sums + tile.value / B * TILE_SIDE * row + tile.value % B * TILE_SIDE); });
  };
  if (accumulate) {
    for_each_sum([=](auto tile, float *ptr) ALWAYS_INLINE { amx::load<tile.value>(ptr, sums_stride); });
  } else {
    amx::zero<0, A * B>();
  }
  for (int64_t k = 0; k < depth; k += TILE_DEPTH, lhs += TILE_DEPTH, rhs += width) {
    amx::load<4>(lhs, lhs_stride);
    if constexpr (A > 1) amx::load<5>(lhs + TILE_SIDE * depth, lhs_stride);
    static_for<B>([&](auto b) ALWAYS_INLINE {
      amx::load<6 + b.value>(rhs + b.value, rhs_stride);
      amx::dot_bf16<b.value, 4, 6 + b.value>();
      if constexpr (A > 1) amx::dot_bf16<B + b.value, 5, 6 + b.value>();
    });
  }
  for_each_sum([=](auto tile, float *ptr) ALWAYS_INLINE { amx::store<tile.value>(ptr, sums_stride); });
}

// sums (rows, width), with the stride `row`, = or += lhs (rows, depth) times rhs (depth / 2 row pairs, width). rows and width are
// multiples of TILE_SIDE, depth of TILE_DEPTH.
inline void multiply(const BFloat16 *lhs, int64_t rows, int64_t depth, const ivec *rhs, int64_t width, float *sums, int64_t row,
                     bool accumulate) {
  for (int64_t r = 0; r < rows; r += 2 * TILE_SIDE) {
    for (int64_t c = 0; c < width; c += 2 * TILE_SIDE) {
      dispatch<2>(std::min<int64_t>(2, (rows - r) / TILE_SIDE), [&](auto A) {
        dispatch<2>(std::min<int64_t>(2, (width - c) / TILE_SIDE), [&](auto B) {
          multiply_tiles<A.value, B.value>(lhs + r * depth, depth, rhs + c / TILE_SIDE, width, sums + r * row + c, row, accumulate);
        });
      });
    }
  }
}

// A thread's memory for the operands of a product.
struct Operands {
  BFloat16 *lhs;
  ivec *rhs;

  Operands(int64_t rows, int64_t depth, int64_t width) {
    static thread_local Scratch scratch;
    float *memory = scratch.get(depth / 2 * (round_up(rows, TILE_SIDE) + width));
    lhs = reinterpret_cast<BFloat16 *>(memory);
    rhs = reinterpret_cast<ivec *>(memory + depth / 2 * round_up(rows, TILE_SIDE));
  }
};

// to = bfloat16(q * scale), q (rows, d), padded to whole tiles.
inline void round_queries(const float *q, int64_t rows, int64_t d, float scale, BFloat16 *to) {
  const int64_t depth = round_up(d, TILE_DEPTH);
  round_matrix(q, d, rows, d, scale, depth, to);
  std::fill(to + rows * depth, to + round_up(rows, TILE_SIDE) * depth, BFloat16{});
}

// s (rows, `row`) = scores of q, the result of round_queries(), with keys whose dimension i is at kt + i * k_dim. Prefetches the next
// `row` keys.
inline void score(const BFloat16 *q, int64_t rows, int64_t d, const BFloat16 *kt, int64_t k_dim, int64_t keys, float *s, int64_t row) {
  const int64_t depth = round_up(d, TILE_DEPTH), width = round_up(keys, TILE_SIDE);
  const Operands operands(0, depth, width);
  interleave_row_pairs([=](int64_t i) { return i < d ? kt + i * k_dim : nullptr; }, depth, keys, width, row, operands.rhs);
  multiply(q, round_up(rows, TILE_SIDE), depth, operands.rhs, width, s, row, false);
}

// out (rows, d) += p (rows, `row`) times values [from, keys), in tiles whose boundaries do not depend on `from`.
inline void accumulate_pv(const float *p, int64_t row, int64_t rows, const BFloat16 *v, int64_t v_row, int64_t from, int64_t keys,
                          int64_t d, float *out) {
  const int64_t first = from / TILE_DEPTH * TILE_DEPTH, depth = round_up(keys - first, TILE_DEPTH);
  const Operands operands(rows, depth, d);
  round_matrix(p + first, row, rows, round_up(keys - first, TILE_SIDE), 1, depth, operands.lhs);
  const auto row_ptr = [=](int64_t i) { return first + i >= from && first + i < keys ? v + (first + i) * v_row : nullptr; };
  interleave_row_pairs(row_ptr, depth, d, d, row * v_row, operands.rhs);
  multiply(operands.lhs, round_up(rows, TILE_SIDE), depth, operands.rhs, d, out, d, true);
}

}  // namespace bf16
#endif
