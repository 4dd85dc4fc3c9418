// Decoder layers of the Llama kind in one call (norm, attention with RoPE and KV, norm, gated MLP, both added to x), or of the
// Gemma kind (norms behind the attention and the MLP too), and the head.
//
// With few rows a layer's products take some tenths of a millisecond; the operations between them would take as long in Python.
#include "mlp.h"

using std::int64_t;

namespace {

constexpr int64_t MANY = 32;  // rows above which threads share the operations between products, and attention runs chunk by chunk

// x becomes the layer's output.
void compute(const Layer &l, const Batch &batch, const KeysValues &kv, float *x, float *kept_queries, int threads) {
  const int64_t count = batch.sequences * batch.size, size = batch.size, d = l.d;
  const int64_t q_size = l.heads * d, kv_size = l.kv_heads * d;
  static thread_local Scratch scratch;
  const int64_t more = l.gates ? q_size : 0;
  const auto [normed, q, k, v, turned, folded, attended, both, gates] =
      divided<9>(scratch, count, {l.hidden, q_size, kv_size, kv_size, q_size, q_size, q_size, 2 * more, more});
  float *queries = kept_queries ? kept_queries : turned;

  rms_norm(x, count, l.hidden, l.norm, l.eps, normed, l.plus, threads);
  const Matrix inputs[] = {into(l.q, l.gates ? both : q, false), into(l.k, k, false), into(l.v, v, false)};
  must(longdraft_linear(normed, count, l.hidden, inputs, 3, batch.prompt, threads));
  for (int64_t i = 0; l.gates && i < count * l.heads; i++) {
    std::copy_n(both + 2 * i * d, d, q + i * d);
    std::copy_n(both + (2 * i + 1) * d, d, gates + i * d);
  }
  if (l.q_norm) rms_norm(q, count * l.heads, d, l.q_norm, l.q_eps, q, l.plus, threads);
  if (l.k_norm) rms_norm(k, count * l.kv_heads, d, l.k_norm, l.k_eps, k, l.plus, threads);

  // One head at a time: rows of transposed keys share cache lines.
  share_out(count > MANY ? threads : 1, batch.sequences * (l.heads + l.kv_heads), [&](int64_t item) {
    const int64_t b = item / (l.heads + l.kv_heads), head = item % (l.heads + l.kv_heads), h = head - l.heads;
    for (int64_t t = 0; t < size; t++) {
      const int64_t row = b * size + t;
      const float *cos = batch.cos + row * batch.turned, *sin = batch.sin + row * batch.turned;
      if (h < 0) {
        turn(q + row * q_size + head * d, cos, sin, batch.turned, d, queries + ((b * l.heads + head) * size + t) * d);
        continue;
      }
      float *turned_key = folded + (row * l.kv_heads + h) * d;  // still free
      turn(k + row * kv_size + h * d, cos, sin, batch.turned, d, turned_key);
      write_row(kv, batch.slots[b], h, batch.first[b] + t, turned_key, v + row * kv_size + h * d, d);
    }
  });

  for (int64_t b = 0; b < batch.sequences; b++) {
    const std::uint8_t *mask = batch.masks ? batch.masks + b * size * batch.width : nullptr;
    const std::int32_t *begins = batch.begins ? batch.begins + b * size : nullptr;
    if (batch.prompt && size > MANY) {
      must(longdraft_attend_chunk(queries + b * q_size * size, &kv, batch.slots[b], l.heads, l.heads / l.kv_heads, size, d,
                                  batch.ends[b], begins, &l.scoring, folded, threads));
    } else {
      must(longdraft_attend(queries + b * q_size * size, &kv, batch.slots[b], l.kv_heads, l.heads / l.kv_heads * size, d,
                            batch.ends[b], mask, size, batch.width, begins, &l.scoring, folded, threads));
    }
    share_out(count > MANY ? threads : 1, size, [&](int64_t t) {
      for (int64_t h = 0; h < l.heads; h++) {
        std::copy_n(folded + (h * size + t) * d, d, attended + (b * size + t) * q_size + h * d);
      }
    });
  }
  if (l.gates) each_number(attended, gates, count, q_size, threads, [](vec a, vec g) { return a * sigmoid(g); });
  const auto product = [&](const Matrix &o) {
    must(longdraft_linear(attended, count, q_size, &o, 1, batch.prompt, threads));
  };
  add_product(l.o, product, l.post_attn_norm, l.attended_eps, l.plus, x, count, normed, threads);
  compute_mlp(l, l.mlp_eps, l.plus, l.gelu, l.post_mlp_norm, l.done_eps, x, count, batch.prompt, threads);
}

}  // namespace

Code longdraft_stack(const Stack *stack, const Batch *batches, const KeysValues *kv, const DeltaRows *rows_of, float *x,
                     float *const *queries, float *const *hidden, int last, float *logits, int64_t best, float *logprobs,
                     int64_t *tokens, int threads) try {
  const int64_t size = stack->size, count = batches->sequences * batches->size;
  Team::with(threads, [=] {
    for (int64_t i = 0; i < stack->count; i++) {
      const int64_t kind = stack->kinds[i];
      if (stack->deltas[i]) {
        longdraft_delta(stack->deltas[i], rows_of, stack->places[i], batches->sequences, batches->size, x, threads);
      } else {
        compute(*stack->layers[i], batches[kind], of_layer(kv[kind], stack->places[i]), x, queries[i], threads);
      }
      if (hidden[i]) std::copy_n(x, count * size, hidden[i]);
    }
    if (!logits && !best) return;
    // The last rows of each sequence, so many; 0: all.
    const int64_t each = last ? last : batches->size, rows = batches->sequences * each;
    static thread_local Scratch scratch;
    float *normed = scratch.of(Scratch::whole_lines(rows * size) + (logits ? 0 : rows * stack->head.outs));
    for (int64_t r = 0; r < rows; r++) {
      const float *row = x + ((r / each + 1) * batches->size - each + r % each) * size;
      rms_norm(row, 1, size, stack->norm, stack->eps, normed + r * size, stack->plus);
    }
    const Matrix head = into(stack->head, logits ? logits : normed + Scratch::whole_lines(rows * size), false);
    must(longdraft_linear(normed, rows, size, &head, 1, 0, threads));
    if (stack->cap) capped(head.y, rows, head.outs, stack->cap, threads);
    if (best) likeliest(head.y, rows, head.outs, best, logprobs, tokens, threads);
  });
  return DONE;
} CATCH_NO_MEMORY
