// A whole forward in one call: decoder layers of the Llama kind (norm, attention with RoPE and KV, norm, gated MLP) or the Gemma kind
// (additional norms after the attention and the MLP), final norm and head.
//
// For few tokens, the matrix products of a layer take tenths of a millisecond; the operations between them would take as long in Python.
#include "mlp.h"

using std::int64_t;

namespace {

// Runs a layer: its output overwrites x. out_queries: the rotated queries are written there, unless null.
void run_layer(const DecoderLayer &l, const AttentionMetadata &batch, const KVCache &kv, float *x, float *out_queries, int threads) {
  const int64_t n_tokens = batch.n_sequences * batch.query_len, query_len = batch.query_len, d = l.d;
  const int64_t q_size = l.n_heads * d, kv_size = l.n_kv_heads * d;
  static thread_local Scratch scratch;
  const int64_t gate_size = l.gated_attn ? q_size : 0;
  const auto [normed, q, k, v, rotated_q, folded_out, attn_out, q_and_gates, gate_values] =
      split_scratch<9>(scratch, n_tokens, {l.hidden_size, q_size, kv_size, kv_size, q_size, q_size, q_size, 2 * gate_size, gate_size});
  float *queries = out_queries ? out_queries : rotated_q;

  rms_norm(x, n_tokens, l.hidden_size, l.norm, l.eps, normed, l.norm_offset, threads);
  const Matrix inputs[] = {with_output(l.q, l.gated_attn ? q_and_gates : q, false), with_output(l.k, k, false),
                           with_output(l.v, v, false)};
  check(longdraft_linear(normed, n_tokens, l.hidden_size, inputs, 3, batch.prefill, threads));
  for (int64_t i = 0; l.gated_attn && i < n_tokens * l.n_heads; i++) {
    std::copy_n(q_and_gates + 2 * i * d, d, q + i * d);
    std::copy_n(q_and_gates + (2 * i + 1) * d, d, gate_values + i * d);
  }
  if (l.q_norm) rms_norm(q, n_tokens * l.n_heads, d, l.q_norm, l.q_eps, q, l.norm_offset, threads);
  if (l.k_norm) rms_norm(k, n_tokens * l.n_kv_heads, d, l.k_norm, l.k_eps, k, l.norm_offset, threads);

  // RoPE, and the KV write. An item is a head, because tokens share cache lines of the transposed K cache.
  parallel_for(n_tokens > FEW_TOKENS ? threads : 1, batch.n_sequences * (l.n_heads + l.n_kv_heads), [&](int64_t item) {
    const int64_t b = item / (l.n_heads + l.n_kv_heads), head = item % (l.n_heads + l.n_kv_heads), kv_head = head - l.n_heads;
    for (int64_t t = 0; t < query_len; t++) {
      const int64_t row = b * query_len + t;
      const float *cos = batch.cos + row * batch.rotary_dim, *sin = batch.sin + row * batch.rotary_dim;
      if (kv_head < 0) {
        apply_rope(q + row * q_size + head * d, cos, sin, batch.rotary_dim, d, queries + ((b * l.n_heads + head) * query_len + t) * d);
        continue;
      }
      float *rotated_k = folded_out + (row * l.n_kv_heads + kv_head) * d; // memory that is not in use yet
      apply_rope(k + row * kv_size + kv_head * d, cos, sin, batch.rotary_dim, d, rotated_k);
      write_kv(kv, batch.slots[b], kv_head, batch.kv_write_start[b] + t, rotated_k, v + row * kv_size + kv_head * d, d);
    }
  });

  for (int64_t b = 0; b < batch.n_sequences; b++) {
    const std::uint8_t *mask = batch.masks ? batch.masks + b * query_len * batch.mask_width : nullptr;
    const std::int32_t *window_start = batch.window_start ? batch.window_start + b * query_len : nullptr;
    if (batch.prefill && query_len > FEW_TOKENS) {
      check(longdraft_attend_prefill(queries + b * q_size * query_len, &kv, batch.slots[b], l.n_heads, l.n_heads / l.n_kv_heads,
                                     query_len, d, batch.kv_lens[b], window_start, &l.softmax, folded_out, threads));
    } else {
      check(longdraft_attend(queries + b * q_size * query_len, &kv, batch.slots[b], l.n_kv_heads, l.n_heads / l.n_kv_heads * query_len, d,
                            batch.kv_lens[b], mask, query_len, batch.mask_width, window_start, &l.softmax, folded_out, threads));
    }
    parallel_for(n_tokens > FEW_TOKENS ? threads : 1, query_len, [&](int64_t t) {
      for (int64_t h = 0; h < l.n_heads; h++) {
        std::copy_n(folded_out + (h * query_len + t) * d, d, attn_out + (b * query_len + t) * q_size + h * d);
      }
    });
  }
  if (l.gated_attn) elementwise(attn_out, gate_values, n_tokens, q_size, threads, [](vec a, vec g) { return a * sigmoid(g); });
  const auto project = [&](const Matrix &o) { check(longdraft_linear(attn_out, n_tokens, q_size, &o, 1, batch.prefill, threads)); };
  add_product(l.o, project, l.post_attn_norm, l.post_attn_eps, l.norm_offset, x, n_tokens, normed, threads);
  compute_mlp(l, l.mlp_eps, l.norm_offset, l.gelu, l.post_mlp_norm, l.post_mlp_eps, x, n_tokens, batch.prefill, threads);
}

}  // namespace

Status longdraft_stack(const DecoderStack *stack, const AttentionMetadata *metadata, const KVCache *kv, const DeltaNetBatch *delta_batch,
                       float *x, float *const *queries, float *const *hidden, int n_last, float *logits, int64_t topk,
                       float *topk_logprobs, int64_t *topk_indices, int threads) try {
  const int64_t hidden_size = stack->hidden_size, n_tokens = metadata->n_sequences * metadata->query_len;
  Team::with(threads, [=] {
    for (int64_t i = 0; i < stack->n_layers; i++) {
      const int64_t group = stack->kv_group[i];
      if (stack->delta_layers[i]) {
        longdraft_delta_net_layer(stack->delta_layers[i], delta_batch, stack->index_in_group[i], metadata->n_sequences,
                                  metadata->query_len, x, threads);
      } else {
        run_layer(*stack->layers[i], metadata[group], kv_layer(kv[group], stack->index_in_group[i]), x, queries[i], threads);
      }
      if (hidden[i]) std::copy_n(x, n_tokens * hidden_size, hidden[i]);
    }
    if (!logits && !topk) return;
    // The last rows of each sequence.
    const int64_t n_rows = n_last ? n_last : metadata->query_len, rows = metadata->n_sequences * n_rows;
    static thread_local Scratch scratch;
    float *normed = scratch.get(Scratch::round_up_to_line(rows * hidden_size) + (logits ? 0 : rows * stack->head.n_out));
    for (int64_t r = 0; r < rows; r++) {
      const float *row = x + ((r / n_rows + 1) * metadata->query_len - n_rows + r % n_rows) * hidden_size;
      rms_norm(row, 1, hidden_size, stack->norm, stack->eps, normed + r * hidden_size, stack->norm_offset);
    }
    const Matrix head = with_output(stack->head, logits ? logits : normed + Scratch::round_up_to_line(rows * hidden_size), false);
    check(longdraft_linear(normed, rows, hidden_size, &head, 1, 0, threads));
    if (stack->softcap) softcap_logits(head.y, rows, head.n_out, stack->softcap, threads);
    if (topk) topk_of_rows(head.y, rows, head.n_out, topk, topk_logprobs, topk_indices, threads);
  });
  return OK;
} CATCH_EXCEPTIONS
