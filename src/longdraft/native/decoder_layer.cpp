// A whole forward in one call: decoder layers like Llama's (norm, attention with RoPE, norm, gated MLP) or like Gemma's (with additional
// norms after the attention and the MLP), then the final norm and the LM head.
//
// For few tokens, the matrix products of a layer take tenths of a millisecond; the operations between them would take as long in Python.
#include "mlp.h"

namespace {

// Runs a layer: overwrites x (B, T, hidden_size) by the output, and writes the new tokens' KV. out_queries: memory for the queries after
// RoPE (B, n_heads, T, d), or null.
void run_layer(const DecoderLayer &layer, const AttentionMetadata &metadata, const KVCache &kv, float *x, float *out_queries, int threads) {
  const int64_t n_tokens = metadata.n_sequences * metadata.query_len, query_len = metadata.query_len, d = layer.d;
  const int64_t q_size = layer.n_heads * d, kv_size = layer.n_kv_heads * d;
  static thread_local Scratch scratch;
  const int64_t gate_size = layer.gated_attn ? q_size : 0;
  // heads_out: the attention's output, head by head (n_heads, T, d); attn_out: token by token (B, T, n_heads * d).
  const auto [normed, q, k, v, rotated_q, heads_out, attn_out, q_and_gates, gate_values] =
      split_scratch<9>(scratch, n_tokens, {layer.hidden_size, q_size, kv_size, kv_size, q_size, q_size, q_size, 2 * gate_size, gate_size});
  float *queries = out_queries ? out_queries : rotated_q;

  rms_norm(x, n_tokens, layer.hidden_size, layer.norm, layer.eps, normed, layer.norm_offset, threads);
  const Matrix inputs[] = {with_output(layer.q, layer.gated_attn ? q_and_gates : q, false), with_output(layer.k, k, false),
                           with_output(layer.v, v, false)};
  check(longdraft_linear(normed, n_tokens, layer.hidden_size, inputs, 3, metadata.prefill, threads));
  for (int64_t i = 0; layer.gated_attn && i < n_tokens * layer.n_heads; i++) {
    std::copy_n(q_and_gates + 2 * i * d, d, q + i * d);
    std::copy_n(q_and_gates + (2 * i + 1) * d, d, gate_values + i * d);
  }
  if (layer.q_norm) rms_norm(q, n_tokens * layer.n_heads, d, layer.q_norm, layer.q_eps, q, layer.norm_offset, threads);
  if (layer.k_norm) rms_norm(k, n_tokens * layer.n_kv_heads, d, layer.k_norm, layer.k_eps, k, layer.norm_offset, threads);

  // Applies RoPE and writes the KV. A work item is a head of a sequence, because tokens share cache lines of the transposed K cache.
  parallel_for(n_tokens > FEW_TOKENS ? threads : 1, metadata.n_sequences * (layer.n_heads + layer.n_kv_heads), [&](int64_t item) {
    const int64_t b = item / (layer.n_heads + layer.n_kv_heads), head = item % (layer.n_heads + layer.n_kv_heads);
    const int64_t kv_head = head - layer.n_heads;  // negative: a query head
    for (int64_t t = 0; t < query_len; t++) {
      const int64_t row = b * query_len + t;
      const float *cos = metadata.cos + row * metadata.rotary_dim, *sin = metadata.sin + row * metadata.rotary_dim;
      if (kv_head < 0) {
        apply_rope(q + row * q_size + head * d, cos, sin, metadata.rotary_dim, d, queries + ((b * layer.n_heads + head) * query_len + t) * d);
        continue;
      }
      float *rotated_k = heads_out + (row * layer.n_kv_heads + kv_head) * d;  // memory that is not in use yet
      apply_rope(k + row * kv_size + kv_head * d, cos, sin, metadata.rotary_dim, d, rotated_k);
      write_kv(kv, metadata.slots[b], kv_head, metadata.kv_write_start[b] + t, rotated_k, v + row * kv_size + kv_head * d, d);
    }
  });

  for (int64_t b = 0; b < metadata.n_sequences; b++) {
    const std::uint8_t *mask = metadata.masks ? metadata.masks + b * query_len * metadata.mask_width : nullptr;
    const std::int32_t *window_start = metadata.window_start ? metadata.window_start + b * query_len : nullptr;
    if (metadata.prefill && query_len > FEW_TOKENS) {
      check(longdraft_attend_prefill(queries + b * q_size * query_len, &kv, metadata.slots[b], layer.n_heads,
                                     layer.n_heads / layer.n_kv_heads, query_len, d, metadata.kv_lens[b], window_start, metadata.n_first,
                                     &layer.softmax, heads_out, threads));
    } else {
      check(longdraft_attend(queries + b * q_size * query_len, &kv, metadata.slots[b], layer.n_kv_heads,
                             layer.n_heads / layer.n_kv_heads * query_len, d, metadata.kv_lens[b], mask, query_len, metadata.mask_width,
                             window_start, &layer.softmax, heads_out, threads));
    }
    parallel_for(n_tokens > FEW_TOKENS ? threads : 1, query_len, [&](int64_t t) {
      for (int64_t h = 0; h < layer.n_heads; h++) {
        std::copy_n(heads_out + (h * query_len + t) * d, d, attn_out + (b * query_len + t) * q_size + h * d);
      }
    });
  }
  if (layer.gated_attn) elementwise(attn_out, gate_values, n_tokens, q_size, threads, [](vec a, vec g) { return a * sigmoid(g); });
  const auto project = [&](const Matrix &o) { check(longdraft_linear(attn_out, n_tokens, q_size, &o, 1, metadata.prefill, threads)); };
  add_product(layer.o, project, layer.post_attn_norm, layer.post_attn_eps, layer.norm_offset, x, n_tokens, normed, threads);
  compute_mlp(layer, layer.mlp_eps, layer.norm_offset, layer.gelu, layer.post_mlp_norm, layer.post_mlp_eps, x, n_tokens, metadata.prefill,
              threads);
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
    // The head computes the last n_logits tokens of each sequence.
    const int64_t n_logits = n_last ? n_last : metadata->query_len, rows = metadata->n_sequences * n_logits;
    static thread_local Scratch scratch;
    float *normed = scratch.get(Scratch::round_up_to_line(rows * hidden_size) + (logits ? 0 : rows * stack->head.n_out));
    for (int64_t r = 0; r < rows; r++) {
      const float *row = x + ((r / n_logits + 1) * metadata->query_len - n_logits + r % n_logits) * hidden_size;
      rms_norm(row, 1, hidden_size, stack->norm, stack->eps, normed + r * hidden_size, stack->norm_offset);
    }
    const Matrix head = with_output(stack->head, logits ? logits : normed + Scratch::round_up_to_line(rows * hidden_size), false);
    check(longdraft_linear(normed, rows, hidden_size, &head, 1, 0, threads));
    if (stack->softcap) cap_logits(head.y, rows, head.n_out, stack->softcap, threads);
    if (topk) topk_of_rows(head.y, rows, head.n_out, topk, topk_logprobs, topk_indices, threads);
  });
  return OK;
} CATCH_EXCEPTIONS
