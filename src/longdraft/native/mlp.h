// The MLP of a decoder layer, and how products are added to its rows.
#pragma once

#include <array>

#include "packed.h"
#include "parts.h"
#include "products.h"

namespace {

// Room for rows of several sizes, one behind the other.
template <int COUNT>
inline std::array<float *, COUNT> divided(Scratch &scratch, int64_t rows, const int64_t (&sizes)[COUNT]) {
  int64_t total = 0;
  for (int64_t n : sizes) total += Scratch::whole_lines(rows * n);
  std::array<float *, COUNT> parts;
  parts[0] = scratch.of(total);
  for (int i = 1; i < COUNT; i++) parts[i] = parts[i - 1] + Scratch::whole_lines(rows * sizes[i - 1]);
  return parts;
}

// x += what product(matrix) computes, or its norm, if there is one, in room as large as x.
template <typename Product>
inline void add_product(const Matrix &m, const Product &product, const float *norm, float eps, float plus, float *x, int64_t rows,
                        float *room, int threads) {
  if (!norm) return product(into(m, x, true));
  product(into(m, room, false));
  rms_norm(room, rows, m.outs, norm, eps, room, plus, threads);
  each_number(x, room, rows, m.outs, threads, [](vec a, vec b) { return a + b; });
}

// x += the product of rows `in`.
inline void add_product(const Matrix &m, const float *in, int64_t size, float *x, int64_t rows, bool prompt, int threads) {
  const Matrix product = into(m, x, true);
  must(longdraft_linear(in, rows, size, &product, 1, prompt, threads));
}

// x += a gated MLP of its norm, whose output may have a norm too. L: a layer with an MLP.
template <typename L>
inline void compute_mlp(const L &l, float eps, float plus, bool by_gelu, const float *post_mlp_norm, float done_eps, float *x,
                        int64_t rows, bool prompt, int threads) {
  static thread_local Scratch scratch;
  float *normed = scratch.of(rows * l.hidden);
  rms_norm(x, rows, l.hidden, l.mlp_norm, eps, normed, plus, threads);
  const auto product = [&](const Matrix &down) {
    multiply_gated(normed, rows, l.hidden, l.gate, l.up, by_gelu, down, prompt, threads);
  };
  add_product(l.down, product, post_mlp_norm, done_eps, plus, x, rows, normed, threads);
}

}  // namespace
