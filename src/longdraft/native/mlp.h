// The MLP of a decoder layer, and how products are added to its rows.
#pragma once

#include <array>

#include "packed.h"
#include "parts.h"

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

// x += the product of rows `in`.
inline void add_product(const Matrix &m, const float *in, int64_t size, float *x, int64_t rows, bool prompt, int threads) {
  const Matrix product = into(m, x, true);
  must(longdraft_linear(in, rows, size, &product, 1, prompt, threads));
}

// The same with a norm between, if there is one, in room as large as x.
inline void add_product(const Matrix &m, const float *in, int64_t size, const float *norm, float eps, float plus, float *x,
                        int64_t rows, bool prompt, float *room, int threads) {
  if (!norm) return add_product(m, in, size, x, rows, prompt, threads);
  const Matrix product = into(m, room, false);
  must(longdraft_linear(in, rows, size, &product, 1, prompt, threads));
  rms_norm(room, rows, m.outs, norm, eps, room, plus);
  each_number(x, room, rows, m.outs, threads, [](vec a, vec b) { return a + b; });
}

// x += a gated MLP of its norm, whose output may have a norm too. L: a layer with an MLP.
template <typename L>
inline void compute_mlp(const L &l, float eps, float plus, bool by_gelu, const float *done_norm, float done_eps, float *x,
                        int64_t rows, bool prompt, int threads) {
  static thread_local Scratch scratch;
  const auto [normed, gate, up] = divided<3>(scratch, rows, {l.hidden, l.inner, l.inner});
  rms_norm(x, rows, l.hidden, l.mlp_norm, eps, normed, plus);
  const Matrix inputs[] = {into(l.gate, gate, false), into(l.up, up, false)};
  must(longdraft_linear(normed, rows, l.hidden, inputs, 2, prompt, threads));
  gated(gate, up, rows, l.inner, threads, by_gelu);
  add_product(l.down, gate, l.inner, done_norm, done_eps, plus, x, rows, prompt, normed, threads);
}

}  // namespace
