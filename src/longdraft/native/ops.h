// The operations of a decoder layer between matrix products (norms, RoPE, activations), and the top k of logits.
#pragma once

#include "kernels.h"
#include "threads.h"
#include "vectors.h"
#include <cmath>
#include <limits>

namespace {

using std::int64_t;

// rms_norm() runs on several threads for more numbers than this.
constexpr int64_t PARALLEL_MIN = 1 << 16;

// Applies an RMS norm to each row: to = from / rms(from) * (weight + norm_offset).
inline void rms_norm(const float *from, int64_t rows, int64_t size, const float *weight, float eps, float *to, float norm_offset = 0,
                     int threads = 1) {
  parallel_for(rows * size > PARALLEL_MIN ? threads : 1, rows, [=](int64_t r) {
    const float *x = from + r * size;
    float *y = to + r * size;
    Sum16 squares;
    int64_t i = 0;
    for (; i + 16 <= size; i += 16) {
      UNROLL for (int j = 0; j < Sum16::VECTORS; j++) {
        const vec a = load(x + i + j * LANES);
        squares.parts[j] = fmadd(a, a, squares.parts[j]);
      }
    }
    const vec partial_sums = squares.fold_to_vector();
    float sum = horizontal_sums<1>(&partial_sums)[0];
    for (; i < size; i++) sum = fmadd(x[i], x[i], sum);
    const float factor = 1.0f / std::sqrt(sum / size + eps);
    for (i = 0; i + LANES <= size; i += LANES) store(y + i, (load(weight + i) + norm_offset) * (load(x + i) * factor));
    for (; i < size; i++) y[i] = (weight[i] + norm_offset) * (x[i] * factor);
  });
}

// Applies RoPE to one head, in the NeoX style: dimension i < rotary_dim / 2 is paired with i + rotary_dim / 2.
inline void apply_rope(const float *x, const float *cos, const float *sin, int64_t rotary_dim, int64_t d, float *y) {
  const int64_t half = rotary_dim / 2;
  for (int64_t i = 0; i < half; i++) {
    y[i] = x[i] * cos[i] - x[half + i] * sin[i];
    y[half + i] = x[half + i] * cos[half + i] + x[i] * sin[half + i];
  }
  std::copy_n(x + rotary_dim, d - rotary_dim, y + rotary_dim);
}

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }  // above 20 equal to x in float32

inline vec silu(vec x) {
  const vec e = v_exp(x < 0 ? x : -x);
  return x * (x < 0 ? e : broadcast(1.0f)) / (1.0f + e);
}

inline vec sigmoid(vec x) {
  const vec e = v_exp(x < 0 ? x : -x);
  return (x < 0 ? e : broadcast(1.0f)) / (1.0f + e);
}

// GELU approximated by tanh, as in Gemma: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))).
inline vec gelu(vec x) { return 0.5f * x * (1.0f + v_tanh(0.7978845608f * fmadd(0.044715f * x * x, x, x))); }

// Computes x = f(x, y), element by element. Vectors never span rows, so that a row's bits do not depend on other rows.
template <typename F> inline void elementwise(float *x, const float *y, int64_t rows, int64_t size, int threads, const F &f) {
  constexpr int64_t ITEM_SIZE = 4096;  // numbers of a work item
  const int64_t items_per_row = (size + ITEM_SIZE - 1) / ITEM_SIZE;
  parallel_for(rows * size > 4 * ITEM_SIZE ? threads : 1, rows * items_per_row, [=](int64_t item) {
    const int64_t row = item / items_per_row * size, from = item % items_per_row * ITEM_SIZE,
                  end = row + std::min(size, from + ITEM_SIZE);
    int64_t i = row + from;
    for (; i + LANES <= end; i += LANES) store(x + i, f(load(x + i), load(y + i)));
    if (i < end) store_partial(x + i, f(load_partial(x + i, end - i), load_partial(y + i, end - i)), end - i);
  });
}

// Computes gate = silu(gate) * up, or gelu(gate) * up.
inline void gate_and_mul(float *gate, const float *up, int64_t rows, int64_t size, int threads, bool use_gelu = false) {
  if (use_gelu) return elementwise(gate, up, rows, size, threads, [](vec x, vec y) { return gelu(x) * y; });
  elementwise(gate, up, rows, size, threads, [](vec x, vec y) { return silu(x) * y; });
}

// Caps logits: x = softcap * tanh(x / softcap).
inline void cap_logits(float *x, int64_t rows, int64_t size, float softcap, int threads) {
  elementwise(x, x, rows, size, threads, [=](vec a, vec) { return softcap * v_tanh(a * (1.0f / softcap)); });
}

// Writes the log-probabilities and the indices of a row's k largest logits, the largest first. A NaN logit ranks lowest, but makes all
// log-probabilities NaN.
inline void topk_of_row(const float *logits, int64_t size, int64_t k, float *logprobs, int64_t *indices) {
  constexpr float LOWEST = -std::numeric_limits<float>::infinity();
  float kth_logit = LOWEST;  // the smallest so far
  int64_t count = 0;
  for (int64_t j = 0; j < size; j++) {
    if (count == k && !(logits[j] > kth_logit)) continue;
    const float x = logits[j] == logits[j] ? logits[j] : LOWEST;
    int64_t i = count < k ? count++ : k - 1;
    for (; i > 0 && logprobs[i - 1] < x; i--) {
      logprobs[i] = logprobs[i - 1];
      indices[i] = indices[i - 1];
    }
    logprobs[i] = x;
    indices[i] = j;
    kth_logit = logprobs[count - 1];  // logprobs holds logits until the end
  }
  const float max_logit = logprobs[0];
  vec sum = {};
  int64_t j = 0;
  for (; j + LANES <= size; j += LANES) sum += v_exp(load(logits + j) - max_logit);
  float sum_exp = horizontal_sums<1>(&sum)[0];
  for (; j < size; j++) sum_exp += std::exp(logits[j] - max_logit);
  const float log_sum_exp = max_logit + std::log(sum_exp);
  for (int64_t i = 0; i < k; i++) logprobs[i] -= log_sum_exp;
}

// Calls topk_of_row() for each row.
inline void topk_of_rows(const float *logits, int64_t rows, int64_t size, int64_t k, float *logprobs, int64_t *indices, int threads) {
  parallel_for(threads, rows, [=](int64_t r) { topk_of_row(logits + r * size, size, k, logprobs + r * k, indices + r * k); });
}

// Returns a copy of m that writes its outputs to y.
inline Matrix with_output(Matrix m, float *y, bool accumulate) {
  m.y = y;
  m.accumulate = accumulate;
  return m;
}

}  // namespace
