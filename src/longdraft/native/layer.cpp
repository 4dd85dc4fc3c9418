// Decoder layers of the Llama kind in one call (norm, attention with RoPE and KV, norm, gated MLP, both added to x), and the
// head.
//
// With few rows a layer's products take some tenths of a millisecond; the operations between them would take as long in Python.
#include "packed.h"
#include "parts.h"

using std::int64_t;

namespace {

constexpr int64_t MANY = 32;  // rows above which threads share the operations between products, and attention runs chunk by chunk

// Normalises each head's vector, if the layer has norms for queries and keys.
void norm_heads(float *x, int64_t vectors, int64_t d, const float *weight, float eps) {
  if (weight) rms_norm(x, vectors, d, weight, eps, x);
}

// x becomes the layer's output.
void compute(const Layer &l, const Batch &batch, const KeysValues &kv, float *x, float *kept_queries, int threads) {
  const int64_t count = batch.sequences * batch.size, size = batch.size, d = l.d;
  const int64_t q_size = l.heads * d, kv_size = l.kv_heads * d;
  static thread_local Scratch scratch;
  const int64_t sizes[] = {l.hidden, q_size, kv_size, kv_size, q_size, q_size, q_size, l.inner, l.inner};
  float *parts[9];
  int64_t total = 0;
  for (int64_t n : sizes) total += Scratch::whole_lines(count * n);
  parts[0] = scratch.of(total);
  for (int i = 1; i < 9; i++) parts[i] = parts[i - 1] + Scratch::whole_lines(count * sizes[i - 1]);
  const auto [normed, q, k, v, turned, folded, attended, gate, up] = parts;
  float *queries = kept_queries ? kept_queries : turned;

  rms_norm(x, count, l.hidden, l.norm, l.eps, normed);
  const Matrix inputs[] = {into(l.q, q, false), into(l.k, k, false), into(l.v, v, false)};
  longdraft_linear(normed, count, l.hidden, inputs, 3, threads);
  norm_heads(q, count * l.heads, d, l.q_norm, l.q_eps);
  norm_heads(k, count * l.kv_heads, d, l.k_norm, l.k_eps);

  // One head at a time: rows of transposed keys share cache lines.
  share_out(count > MANY ? threads : 1, batch.sequences * (l.heads + l.kv_heads), [&](int64_t item) {
    const int64_t b = item / (l.heads + l.kv_heads), head = item % (l.heads + l.kv_heads), h = head - l.heads;
    for (int64_t t = 0; t < size; t++) {
      const int64_t row = b * size + t;
      const float *cos = batch.cos + row * d, *sin = batch.sin + row * d;
      if (h < 0) {
        turn(q + row * q_size + head * d, cos, sin, d, queries + ((b * l.heads + head) * size + t) * d, 1);
        continue;
      }
      float *turned_key = folded + (row * l.kv_heads + h) * d;  // still free
      turn(k + row * kv_size + h * d, cos, sin, d, turned_key, 1);
      write_row(kv, batch.slots[b], h, batch.first[b] + t, turned_key, v + row * kv_size + h * d, d);
    }
  });

  const Scoring scoring{l.scale, 0, nullptr};
  for (int64_t b = 0; b < batch.sequences; b++) {
    const std::uint8_t *mask = batch.masks ? batch.masks + b * size * batch.width : nullptr;
    if (batch.prompt && size > MANY) {
      longdraft_attend_chunk(queries + b * q_size * size, &kv, batch.slots[b], l.heads, l.heads / l.kv_heads, size, d,
                             batch.ends[b], nullptr, &scoring, folded, threads);
    } else {
      longdraft_attend(queries + b * q_size * size, &kv, batch.slots[b], l.kv_heads, l.heads / l.kv_heads * size, d,
                       batch.ends[b], mask, size, batch.width, nullptr, &scoring, folded, threads);
    }
    for (int64_t t = 0; t < size; t++) {
      for (int64_t h = 0; h < l.heads; h++) {
        std::copy_n(folded + (h * size + t) * d, d, attended + (b * size + t) * q_size + h * d);
      }
    }
  }
  const Matrix output = into(l.o, x, true);
  longdraft_linear(attended, count, q_size, &output, 1, threads);

  rms_norm(x, count, l.hidden, l.second_norm, l.second_eps, normed);
  const Matrix wide[] = {into(l.gate, gate, false), into(l.up, up, false)};
  longdraft_linear(normed, count, l.hidden, wide, 2, threads);
  gated(gate, up, count, l.inner, threads);
  const Matrix back = into(l.down, x, true);
  longdraft_linear(gate, count, l.inner, &back, 1, threads);
}

}  // namespace

void longdraft_stack(const Stack *stack, const Batch *batch, const KeysValues *kv, float *x, float *const *queries,
                     float *const *hidden, int last, float *logits, int64_t best, float *log_probs, int64_t *tokens,
                     int threads) {
  const int64_t size = stack->layers[0]->hidden, count = batch->sequences * batch->size;
  Team::with(threads, [=] {
    for (int64_t i = 0; i < stack->count; i++) {
      compute(*stack->layers[i], *batch, of_layer(*kv, i), x, queries[i], threads);
      if (hidden[i]) std::copy_n(x, count * size, hidden[i]);
    }
    if (!logits && !best) return;
    const int64_t step = last ? batch->size : 1, rows = count / step;
    static thread_local Scratch scratch;
    float *normed = scratch.of(Scratch::whole_lines(rows * size) + (logits ? 0 : rows * stack->head.outs));
    for (int64_t r = 0; r < rows; r++) {
      rms_norm(x + ((r + 1) * step - 1) * size, 1, size, stack->norm, stack->eps, normed + r * size);
    }
    const Matrix head = into(stack->head, logits ? logits : normed + Scratch::whole_lines(rows * size), false);
    longdraft_linear(normed, rows, size, &head, 1, threads);
    if (best) likeliest(head.y, rows, head.outs, best, log_probs, tokens, threads);
  });
}
