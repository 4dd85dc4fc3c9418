// Matrix products in bfloat16 on AMX, for attention to a bfloat16 KV cache: lhs (rows, depth) times rhs (depth, columns). Sums are float32.
//
// tdpbf16ps adds 32 products at a time, in an unspecified order. Rows of a tile are independent, so a row's bits depend neither on the
// other rows nor on their number. Matrices are padded to whole tiles by zeros, because products with 0 change no sum. Strides are in
// elements, from row to row.
#pragma once

#include "packed_rows.h"
#include "isa/amx.h"
#include <algorithm>

namespace bf16 {

using std::int64_t;

constexpr int64_t TILE_DEPTH = 32;  // bfloat16 numbers in a tile's row
constexpr int64_t TILE_SIDE = 16;   // rows of a tile, and columns of a tile of sums

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

#if defined(LONGDRAFT_AMX)
// Rounds 32 floats to bfloat16: the result's lower half is from a, its upper half from b (vcvtne2ps2bf16).
inline ivec round_to_bf16(vec a, vec b) {
  ivec pair;
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(pair) : "v"(b), "v"(a));
  return pair;
}

// Rounds a left operand: to (rows, depth) = bfloat16(x * scale). x (rows, columns) is padded by zeros; columns is a multiple of 16.
inline void round_matrix(const float *x, int64_t x_stride, int64_t rows, int64_t columns, float scale, int64_t depth, BFloat16 *to) {
  for (int64_t r = 0; r < rows; r++, x += x_stride, to += depth) {
    for (int64_t j = 0; j < depth; j += TILE_DEPTH) {
      const vec a = j < columns ? load(x + j) * scale : vec{}, b = j + TILE_SIDE < columns ? load(x + j + TILE_SIDE) * scale : vec{};
      const ivec pair = round_to_bf16(a, b);
      std::memcpy(to + j, &pair, sizeof pair);
    }
  }
}

// Writes a right operand (depth, columns) in AMX's layout (VNNI), padded by zeros to `width` columns:
//     row i     a0 a1 a2 ...      -->   row i / 2 of `to`, 32-bit lanes:  (a0 b0) (a1 b1) (a2 b2) ...
//     row i + 1 b0 b1 b2 ...
// row_ptr(i) returns the address of row i, or null for a row of zeros. Prefetches what lies prefetch_distance elements behind (0: nothing).
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

// Does multiply() for M x N tiles of sums, M and N at most 2: tiles 0 to 3 hold sums, 4 and 5 lhs, 6 and 7 rhs.
template <int M, int N>
inline void multiply_tiles(const BFloat16 *lhs, int64_t depth, const ivec *rhs, int64_t width, float *sums, int64_t sums_stride,
                           bool accumulate) {
  const int64_t sums_row_bytes = 4 * sums_stride, lhs_row_bytes = 2 * depth, rhs_row_bytes = 4 * width;
  const auto for_each_sum = [&](const auto &f) ALWAYS_INLINE {
    static_for<M * N>([&](auto tile) ALWAYS_INLINE {
      f(tile, sums + tile.value / N * TILE_SIDE * sums_stride + tile.value % N * TILE_SIDE);
    });
  };
  if (accumulate) {
    for_each_sum([=](auto tile, float *ptr) ALWAYS_INLINE { amx::load<tile.value>(ptr, sums_row_bytes); });
  } else {
    amx::zero<0, M * N>();
  }
  for (int64_t k = 0; k < depth; k += TILE_DEPTH, lhs += TILE_DEPTH, rhs += width) {
    amx::load<4>(lhs, lhs_row_bytes);
    if constexpr (M > 1) amx::load<5>(lhs + TILE_SIDE * depth, lhs_row_bytes);
    static_for<N>([&](auto n) ALWAYS_INLINE {
      amx::load<6 + n.value>(rhs + n.value, rhs_row_bytes);
      amx::dot_bf16<n.value, 4, 6 + n.value>();
      if constexpr (M > 1) amx::dot_bf16<N + n.value, 5, 6 + n.value>();
    });
  }
  for_each_sum([=](auto tile, float *ptr) ALWAYS_INLINE { amx::store<tile.value>(ptr, sums_row_bytes); });
}

// Multiplies matrices: sums (rows, width) = lhs (rows, depth) times rhs, or sums += if `accumulate`. rhs is from interleave_row_pairs().
// rows and width are multiples of TILE_SIDE, depth is one of TILE_DEPTH.
inline void multiply(const BFloat16 *lhs, int64_t rows, int64_t depth, const ivec *rhs, int64_t width, float *sums, int64_t sums_stride,
                     bool accumulate) {
  for (int64_t r = 0; r < rows; r += 2 * TILE_SIDE) {
    for (int64_t c = 0; c < width; c += 2 * TILE_SIDE) {
      dispatch<2>(std::min<int64_t>(2, (rows - r) / TILE_SIDE), [&](auto m) {
        dispatch<2>(std::min<int64_t>(2, (width - c) / TILE_SIDE), [&](auto n) {
          multiply_tiles<m.value, n.value>(lhs + r * depth, depth, rhs + c / TILE_SIDE, width, sums + r * sums_stride + c, sums_stride,
                                           accumulate);
        });
      });
    }
  }
}

// A thread's memory for the two operands of a product, which the next Operands of the thread reuse.
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

// Rounds queries: to = bfloat16(q * scale) for q (rows, d), padded to whole tiles.
inline void round_queries(const float *q, int64_t rows, int64_t d, float scale, BFloat16 *to) {
  const int64_t depth = round_up(d, TILE_DEPTH);
  round_matrix(q, d, rows, d, scale, depth, to);
  std::fill(to + rows * depth, to + round_up(rows, TILE_SIDE) * depth, BFloat16{});
}

// Computes scores s = q times kt (d, n_keys), the transposed keys, where q is the result of round_queries(). Prefetches the next s_stride
// keys.
inline void score(const BFloat16 *q, int64_t rows, int64_t d, const BFloat16 *kt, int64_t kt_stride, int64_t n_keys, float *s,
                  int64_t s_stride) {
  const int64_t depth = round_up(d, TILE_DEPTH), width = round_up(n_keys, TILE_SIDE);
  const Operands operands(0, depth, width);
  interleave_row_pairs([=](int64_t i) { return i < d ? kt + i * kt_stride : nullptr; }, depth, n_keys, width, s_stride, operands.rhs);
  multiply(q, round_up(rows, TILE_SIDE), depth, operands.rhs, width, s, s_stride, false);
}

// Adds weighted values: out (rows, d) += p (rows, n_keys) times v (n_keys, d), without keys before `from`. Tile boundaries do not depend
// on `from`. Prefetches the values of the next p_stride keys.
inline void accumulate_pv(const float *p, int64_t p_stride, int64_t rows, const BFloat16 *v, int64_t v_row_stride, int64_t from,
                          int64_t n_keys, int64_t d, float *out) {
  const int64_t first = from / TILE_DEPTH * TILE_DEPTH, depth = round_up(n_keys - first, TILE_DEPTH);
  const Operands operands(rows, depth, d);
  round_matrix(p + first, p_stride, rows, round_up(n_keys - first, TILE_SIDE), 1, depth, operands.lhs);
  const auto row_ptr = [=](int64_t i) { return first + i >= from && first + i < n_keys ? v + (first + i) * v_row_stride : nullptr; };
  interleave_row_pairs(row_ptr, depth, d, d, p_stride * v_row_stride, operands.rhs);
  multiply(operands.lhs, round_up(rows, TILE_SIDE), depth, operands.rhs, d, out, d, true);
}
#else
// What attention names that HAVE_AMX keeps from running.
struct Operands {
  BFloat16 *lhs;
  ivec *rhs;
  Operands(int64_t rows, int64_t depth, int64_t width);
};
void round_matrix(const float *x, int64_t x_stride, int64_t rows, int64_t columns, float scale, int64_t depth, BFloat16 *to);
template <typename RowPtr> void interleave_row_pairs(const RowPtr &, int64_t, int64_t, int64_t, int64_t, ivec *) {}
void multiply(const BFloat16 *lhs, int64_t rows, int64_t depth, const ivec *rhs, int64_t width, float *sums, int64_t sums_stride,
              bool accumulate);
void round_queries(const float *q, int64_t rows, int64_t d, float scale, BFloat16 *to);
void score(const BFloat16 *q, int64_t rows, int64_t d, const BFloat16 *kt, int64_t kt_stride, int64_t n_keys, float *s, int64_t s_stride);
void accumulate_pv(const float *p, int64_t p_stride, int64_t rows, const BFloat16 *v, int64_t v_row_stride, int64_t from, int64_t n_keys,
                   int64_t d, float *out);
#endif

}  // namespace bf16
