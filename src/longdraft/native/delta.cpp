// Decoder layers with a gated DeltaNet in one call: its products, its short convolution, its recurrence, and the MLP.
#include <vector>

#include "mlp.h"

using std::int64_t;

namespace {

// Heads (from, size) of a row, each as many times as `to` needs.
void spread(const float *in, int64_t from, int64_t to, int64_t size, float *out) {
  for (int64_t h = 0; h < to; h++) std::copy_n(in + h / (to / from) * size, size, out + h * size);
}

}  // namespace

void longdraft_delta(const DeltaLayer *layer, const DeltaRows *rows, int64_t number, int64_t sequences, int64_t size, float *x,
                     int threads) {
  const DeltaLayer &l = *layer;
  const Recurrence &r = l.recurrence;
  const int64_t count = sequences * size, channels = l.convolution.channels, values = r.heads * r.values;
  static thread_local Scratch scratch;
  const auto [normed, mixed, convolved, z, b, a, out] =
      divided<7>(scratch, count, {l.hidden, channels, channels, values, r.heads, r.heads, values});
  rms_norm(x, count, l.hidden, l.norm, l.eps, normed, l.plus);
  const Matrix inputs[] = {into(l.mixed, mixed, false), into(l.z, z, false), into(l.b, b, false), into(l.a, a, false)};
  must(longdraft_linear(normed, count, l.hidden, inputs, 4, 0, threads));

  static thread_local std::vector<ConvolutionSequence> windows;
  windows.clear();
  RecurrentSequence *own = rows->sequences + number * sequences;
  for (int64_t s = 0; s < sequences; s++) {
    float *kept = rows->inputs[number * sequences + s];
    std::copy_n(mixed + s * size * channels, size * channels, kept + own[s].first * channels);
    windows.push_back({rows->windows[number * sequences + s], kept, rows->places[s], size, convolved + s * size * channels});
  }
  must(longdraft_convolve(&l.convolution, windows.data(), sequences, threads));

  const int64_t keys = l.key_heads * r.keys;
  for (int64_t i = 0; i < count; i++) {
    const RecurrentRows &to = own[i / size].rows;
    const int64_t row = own[i / size].first + i % size;
    const float *from = convolved + i * channels;
    float *g = const_cast<float *>(to.g) + row * r.heads, *beta = const_cast<float *>(to.beta) + row * r.heads;
    spread(from, l.key_heads, r.key_heads, r.keys, const_cast<float *>(to.q) + row * r.key_heads * r.keys);
    spread(from + keys, l.key_heads, r.key_heads, r.keys, const_cast<float *>(to.k) + row * r.key_heads * r.keys);
    std::copy_n(from + 2 * keys, values, const_cast<float *>(to.v) + row * values);
    for (int64_t h = 0; h < r.heads; h++) {
      g[h] = l.decay[h] * softplus(a[i * r.heads + h] + l.bias[h]);
      beta[h] = 1.0f / (1.0f + std::exp(-b[i * r.heads + h]));
    }
  }
  for (int64_t s = 0; s < sequences; s++) own[s].out = out + s * size * values;
  must(longdraft_recur(&r, own, sequences, threads));

  rms_norm(out, count * r.heads, r.values, l.out_norm, l.out_eps, out);
  each_number(out, z, count, values, threads, [](vec y, vec gate) { return y * silu(gate); });
  float *ordered = out;
  if (l.order) {
    ordered = convolved;  // as large, and free
    for (int64_t i = 0; i < count * r.heads; i++) {
      std::copy_n(out + (i / r.heads * r.heads + l.order[i % r.heads]) * r.values, r.values, ordered + i * r.values);
    }
  }
  add_product(l.o, ordered, values, x, count, false, threads);
  compute_mlp(l, l.mlp_eps, l.plus, l.gelu, nullptr, 0, x, count, false, threads);
}
