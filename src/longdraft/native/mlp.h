// Computes the MLP of a decoder layer, and matrix products that are added to the residual x.
#pragma once

#include <array>
#include "kv_cache.h"
#include "ops.h"
#include "matmul.h"

namespace {

// Splits a scratch buffer into N arrays (rows, size), where sizes has the size of each.
template <int N> inline std::array<float *, N> split_scratch(Scratch &scratch, int64_t rows, const int64_t (&sizes)[N]) {
  int64_t n_floats = 0;
  for (int64_t n : sizes) n_floats += Scratch::round_up_to_line(rows * n);
  std::array<float *, N> buffers;
  buffers[0] = scratch.get(n_floats);
  for (int i = 1; i < N; i++) buffers[i] = buffers[i - 1] + Scratch::round_up_to_line(rows * sizes[i - 1]);
  return buffers;
}

// Adds y to x, or with `norm` the RMS norm of y. multiply(m) computes y (rows, m.n_out) into m.y. norm: weights of the norm, or null.
// buffer: memory of x's size.
template <typename Product>
inline void add_product(const Matrix &m, const Product &multiply, const float *norm, float eps, float norm_offset, float *x, int64_t rows,
                        float *buffer, int threads) {
  if (!norm) return multiply(with_output(m, x, true));
  multiply(with_output(m, buffer, false));
  rms_norm(buffer, rows, m.n_out, norm, eps, buffer, norm_offset, threads);
  elementwise(x, buffer, rows, m.n_out, threads, [](vec a, vec b) { return a + b; });
}

// Adds a linear layer's outputs to x: x += m(x_in).
inline void add_product(const Matrix &m, const float *x_in, int64_t n_in, float *x, int64_t rows, bool prefill, int threads) {
  const Matrix matrix = with_output(m, x, true);
  check(longdraft_linear(x_in, rows, n_in, &matrix, 1, prefill, threads));
}

// Adds the MLP's output to x: x += MLP(norm(x)), or with post_mlp_norm its RMS norm. Layer: a structure with mlp_norm, gate, up and down.
template <typename Layer>
inline void compute_mlp(const Layer &layer, float eps, float norm_offset, bool use_gelu, const float *post_mlp_norm, float post_mlp_eps,
                        float *x, int64_t rows, bool prefill, int threads) {
  static thread_local Scratch scratch;
  float *normed = scratch.get(rows * layer.hidden_size);
  rms_norm(x, rows, layer.hidden_size, layer.mlp_norm, eps, normed, norm_offset, threads);
  const auto multiply = [&](const Matrix &down) {
    gated_mlp(normed, rows, layer.hidden_size, layer.gate, layer.up, use_gelu, down, prefill, threads);
  };
  add_product(layer.down, multiply, post_mlp_norm, post_mlp_eps, norm_offset, x, rows, normed, threads);
}

}  // namespace
