// The MLP of a decoder layer, and products that are added to the residual.
#pragma once

#include <array>

#include "kv_cache.h"
#include "ops.h"
#include "matmul.h"

namespace {

// Splits a buffer into arrays (rows, size), one for each of `sizes`.
template <int N>
inline std::array<float *, N> split_scratch(Scratch &scratch, int64_t rows, const int64_t (&sizes)[N]) {
  int64_t n_floats = 0;
  for (int64_t n : sizes) n_floats += Scratch::round_up_to_line(rows * n);
  std::array<float *, N> buffers;
  buffers[0] = scratch.get(n_floats);
  for (int i = 1; i < N; i++) buffers[i] = buffers[i - 1] + Scratch::round_up_to_line(rows * sizes[i - 1]);
  return buffers;
}

// x += y, or += RMS norm of y unless `norm` is null, where multiply(m) computes y into m.y. buffer: as large as x.
template <typename Product>
inline void add_product(const Matrix &m, const Product &multiply, const float *norm, float eps, float norm_offset, float *x, int64_t rows,
                        float *buffer, int threads) {
  if (!norm) return multiply(with_output(m, x, true));
  multiply(with_output(m, buffer, false));
  rms_norm(buffer, rows, m.n_out, norm, eps, buffer, norm_offset, threads);
  elementwise(x, buffer, rows, m.n_out, threads, [](vec a, vec b) { return a + b; });
}

// x += the product of m and x_in.
inline void add_product(const Matrix &m, const float *x_in, int64_t n_in, float *x, int64_t rows, bool prefill, int threads) {
  const Matrix matrix = with_output(m, x, true);
  check(longdraft_linear(x_in, rows, n_in, &matrix, 1, prefill, threads));
}

// x += y, or += RMS norm of y unless post_mlp_norm is null, where y = MLP(norm(x)). L: a structure with the MLP's fields.
template <typename L>
inline void compute_mlp(const L &l, float eps, float norm_offset, bool gelu, const float *post_mlp_norm, float post_mlp_eps, float *x,
                        int64_t rows, bool prefill, int threads) {
  static thread_local Scratch scratch;
  float *normed = scratch.get(rows * l.hidden_size);
  rms_norm(x, rows, l.hidden_size, l.mlp_norm, eps, normed, norm_offset, threads);
  const auto multiply = [&](const Matrix &down) {
    gated_mlp(normed, rows, l.hidden_size, l.gate, l.up, gelu, down, prefill, threads);
  };
  add_product(l.down, multiply, post_mlp_norm, post_mlp_eps, norm_offset, x, rows, normed, threads);
}

}  // namespace
