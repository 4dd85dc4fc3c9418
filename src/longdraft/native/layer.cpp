// A decoder layer of the Llama kind in one call: norm, attention with RoPE and KV, norm, gated MLP, both added to x.
//
// With few rows a layer's products take some tenths of a millisecond, and what stands between them in Python as much.
#include "parts.h"

using std::int64_t;

void longdraft_layer(const Layer *layer, const Batch *batch, const KeysValues *kv, const float *x, float *out,
                     float *queries, int threads) {
  const Layer &l = *layer;
  const int64_t count = batch->sequences * batch->size, size = batch->size, d = l.d;
  const int64_t q_size = l.heads * d, kv_size = l.kv_heads * d;
  static thread_local Scratch scratch;
  const int64_t sizes[] = {l.hidden, q_size, kv_size, kv_size, q_size, q_size, l.inner, l.inner};
  float *parts[8];
  int64_t total = 0;
  for (int64_t n : sizes) total += Scratch::whole_lines(count * n);
  parts[0] = scratch.of(total);
  for (int i = 1; i < 8; i++) parts[i] = parts[i - 1] + Scratch::whole_lines(count * sizes[i - 1]);
  const auto [normed, q, k, v, folded, attended, gate, up] = parts;

  rms_norm(x, count, l.hidden, l.norm, l.eps, normed);
  const Matrix inputs[] = {into(l.q, q, false), into(l.k, k, false), into(l.v, v, false)};
  longdraft_linear(normed, count, l.hidden, inputs, 3, threads);

  for (int64_t b = 0; b < batch->sequences; b++) {
    for (int64_t t = 0; t < size; t++) {
      const int64_t row = b * size + t, place = batch->first[b] + t;
      const float *cos = batch->cos + row * d, *sin = batch->sin + row * d;
      for (int64_t h = 0; h < l.heads; h++) {
        turn(q + row * q_size + h * d, cos, sin, d, queries + ((b * l.heads + h) * size + t) * d, 1);
      }
      for (int64_t h = 0; h < l.kv_heads; h++) {
        float *key = kv->k + batch->slots[b] * kv->k_slot + h * kv->k_head + place * kv->k_row;
        float *value = kv->v + batch->slots[b] * kv->v_slot + h * kv->v_head + place * kv->v_row;
        turn(k + row * kv_size + h * d, cos, sin, d, key, kv->k_dim);
        std::copy_n(v + row * kv_size + h * d, d, value);
      }
    }
  }

  for (int64_t b = 0; b < batch->sequences; b++) {
    const std::uint8_t *mask = batch->masks ? batch->masks + b * size * batch->width : nullptr;
    longdraft_attend(queries + b * q_size * size, kv->k + batch->slots[b] * kv->k_slot, kv->k_head, kv->k_row, kv->k_dim,
                     kv->v + batch->slots[b] * kv->v_slot, kv->v_head, kv->v_row, l.kv_heads, l.heads / l.kv_heads * size,
                     d, batch->ends[b], mask, size, batch->width, l.scale, folded, threads);
    for (int64_t t = 0; t < size; t++) {
      for (int64_t h = 0; h < l.heads; h++) {
        std::copy_n(folded + (h * size + t) * d, d, attended + (b * size + t) * q_size + h * d);
      }
    }
  }

  std::copy_n(x, count * l.hidden, out);
  const Matrix output = into(l.o, out, true);
  longdraft_linear(attended, count, q_size, &output, 1, threads);

  rms_norm(out, count, l.hidden, l.second_norm, l.second_eps, normed);
  const Matrix wide[] = {into(l.gate, gate, false), into(l.up, up, false)};
  longdraft_linear(normed, count, l.hidden, wide, 2, threads);
  gated(gate, up, count, l.inner, threads);
  const Matrix back = into(l.down, out, true);
  longdraft_linear(gate, count, l.inner, &back, 1, threads);
}
