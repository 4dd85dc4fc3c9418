// The operations between the products of a decoder layer (norms, RoPE, the gate of an MLP), and the choice of best logits.
#pragma once

#include "kernels.h"
#include "threads.h"
#include "vectors.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace {

using std::int64_t;

// Numbers above which threads share an operation on rows.
constexpr int64_t SHARED = 1 << 16;

// y = x / rms(x) * (weight + plus), row by row.
inline void rms_norm(const float *of, int64_t rows, int64_t size, const float *weight, float eps, float *to, float plus = 0,
                     int threads = 1) {
  share_out(rows * size > SHARED ? threads : 1, rows, [=](int64_t r) {
    const float *x = of + r * size;
    float *y = to + r * size;
    Sixteen squares;
    int64_t i = 0;
    for (; i + 16 <= size; i += 16) {
      UNROLLED for (int j = 0; j < Sixteen::VECTORS; j++) {
        const vec a = load(x + i + j * LANES);
        squares.part[j] = fused(a, a, squares.part[j]);
      }
    }
    const vec folded = squares.folded();
    float total = sums<1>(&folded)[0];
    for (; i < size; i++) total = fused(x[i], x[i], total);
    const float factor = 1.0f / std::sqrt(total / size + eps);
    for (i = 0; i + LANES <= size; i += LANES) store(y + i, (load(weight + i) + plus) * (load(x + i) * factor));
    for (; i < size; i++) y[i] = (weight[i] + plus) * (x[i] * factor);
  });
}

// Applies RoPE to one head's vector, of which the first `turned` dimensions are the two parts of so many pairs.
inline void turn(const float *x, const float *cos, const float *sin, int64_t turned, int64_t d, float *y) {
  const int64_t half = turned / 2;
  for (int64_t i = 0; i < half; i++) {
    y[i] = x[i] * cos[i] - x[half + i] * sin[i];
    y[half + i] = x[half + i] * cos[half + i] + x[i] * sin[half + i];
  }
  std::copy_n(x + turned, d - turned, y + turned);
}

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

inline vec silu(vec x) {
  const vec e = exponential(x < 0 ? x : -x);
  return x * (x < 0 ? e : every(1.0f)) / (1.0f + e);
}

inline vec sigmoid(vec x) {
  const vec e = exponential(x < 0 ? x : -x);
  return (x < 0 ? e : every(1.0f)) / (1.0f + e);
}

// By tanh, as Gemma's: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))).
inline vec gelu(vec x) {
  return 0.5f * x * (1.0f + hyperbolic_tangent(0.7978845608f * fused(0.044715f * x * x, x, x)));
}

// x = what(x, y), row by row, so that the end of a row is computed in the same way with any number of rows.
template <typename What>
inline void each_number(float *x, const float *y, int64_t rows, int64_t size, int threads, const What &what) {
  constexpr int64_t SHARE = 4096;
  const int64_t shares = (size + SHARE - 1) / SHARE;
  share_out(rows * size > 4 * SHARE ? threads : 1, rows * shares, [=](int64_t item) {
    const int64_t row = item / shares * size, from = item % shares * SHARE, end = row + std::min(size, from + SHARE);
    int64_t i = row + from;
    for (; i + LANES <= end; i += LANES) store(x + i, what(load(x + i), load(y + i)));
    if (i < end) store_some(x + i, what(load_some(x + i, end - i), load_some(y + i, end - i)), end - i);
  });
}

// gate = silu(gate) * up, or gelu(gate) * up.
inline void gated(float *gate, const float *up, int64_t rows, int64_t size, int threads, bool by_gelu = false) {
  if (by_gelu) return each_number(gate, up, rows, size, threads, [](vec x, vec y) { return gelu(x) * y; });
  each_number(gate, up, rows, size, threads, [](vec x, vec y) { return silu(x) * y; });
}

// x = cap * tanh(x / cap).
inline void capped(float *x, int64_t rows, int64_t size, float cap, int threads) {
  each_number(x, x, rows, size, threads, [=](vec a, vec) { return cap * hyperbolic_tangent(a * (1.0f / cap)); });
}

// The `best` largest of a row's logits, the largest first: log-probabilities and indices. NaN is never chosen; if there is one,
// all log-probabilities are NaN.
inline void likeliest_of_row(const float *logits, int64_t size, int64_t best, float *logprobs, int64_t *tokens) {
  constexpr float LEAST = -std::numeric_limits<float>::infinity();
  float least = LEAST;
  int64_t count = 0;
  for (int64_t j = 0; j < size; j++) {
    if (count == best && !(logits[j] > least)) continue;
    const float x = logits[j] == logits[j] ? logits[j] : LEAST;
    int64_t i = count < best ? count++ : best - 1;
    for (; i > 0 && logprobs[i - 1] < x; i--) {
      logprobs[i] = logprobs[i - 1];
      tokens[i] = tokens[i - 1];
    }
    logprobs[i] = x;
    tokens[i] = j;
    least = logprobs[count - 1];
  }
  const float high = logprobs[0];
  vec sum = {};
  int64_t j = 0;
  for (; j + LANES <= size; j += LANES) sum += exponential(load(logits + j) - high);
  float total = sums<1>(&sum)[0];
  for (; j < size; j++) total += std::exp(logits[j] - high);
  const float all = high + std::log(total);
  for (int64_t i = 0; i < best; i++) logprobs[i] -= all;
}

// The same of every row.
inline void likeliest(const float *logits, int64_t rows, int64_t size, int64_t best, float *logprobs, int64_t *tokens,
                      int threads) {
  share_out(threads, rows, [=](int64_t r) {
    likeliest_of_row(logits + r * size, size, best, logprobs + r * best, tokens + r * best);
  });
}

inline Matrix into(Matrix m, float *y, bool adds) {
  m.y = y;
  m.adds = adds;
  return m;
}

}  // namespace
