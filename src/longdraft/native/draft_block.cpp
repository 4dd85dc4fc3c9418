// Runs a draft on one level of its tree in one call: the decoder block of LongSpec or EAGLE-3, its head, and the top k of the logits.
//
// In Python, the operations between the matrix products of this one layer would take several times as long as the products.
#include "mlp.h"

namespace {

// The KV entries that tokens see. Members after kv are as in DraftLevelInput; starts is null if all start at 0.
struct VisibleKV {
  const KVCache &kv;
  const int64_t *starts, *lens;
  const std::uint8_t *masks;
  int64_t mask_width;
};

// Applies RoPE to the queries q (B, W, n_heads * d), attends, and overwrites q by the attention's output. buffer: memory of twice q's size.
void attend(const DraftBlock &draft, const DraftLevelInput &batch, const VisibleKV &visible, float *q, float *buffer, int threads) {
  const int64_t query_len = batch.query_len, q_size = draft.n_heads * draft.d, d = draft.d;
  float *rotated = buffer, *attn_out = buffer + Scratch::round_up_to_line(query_len * q_size);
  int64_t row = 0;
  for (int64_t b = 0; b < batch.n_sequences; b++, q += query_len * q_size) {
    row += batch.n_tokens[b] - query_len;
    for (int64_t t = 0; t < query_len; t++, row++) {
      for (int64_t h = 0; h < draft.n_heads; h++) {
        apply_rope(q + t * q_size + h * d, batch.cos + row * d, batch.sin + row * d, d, d, rotated + (h * query_len + t) * d);
      }
    }
    KVCache kv = visible.kv;
    const int64_t start = visible.starts ? visible.starts[b] : 0, n_kv = visible.lens[b] - start;
    const std::uint8_t *mask = visible.masks ? visible.masks + b * query_len * visible.mask_width : nullptr;
    if (start) {  // only in the draft's KV, which is float32
      kv.k = static_cast<float *>(kv.k) + start * kv.k_row_stride;
      kv.v = static_cast<float *>(kv.v) + start * kv.v_row_stride;
    }
    const SoftmaxParams softmax{draft.scale, 0, nullptr};
    check(longdraft_attend(rotated, &kv, batch.slots[b], draft.n_kv_heads, draft.n_heads / draft.n_kv_heads * query_len, d, n_kv, mask,
                           query_len, visible.mask_width, nullptr, &softmax, attn_out, threads));
    for (int64_t t = 0; t < query_len; t++) {
      for (int64_t h = 0; h < draft.n_heads; h++) std::copy_n(attn_out + (h * query_len + t) * d, d, q + t * q_size + h * d);
    }
  }
}

// Does longdraft_draft_level(). B * W rows of out are the residual stream. EAGLE-3 is told from LongSpec by its feature_norm.
void run_level(const DraftBlock &draft, const DraftLevelInput &batch, const KVCache *draft_kv, const KVCache *target_kv, int64_t topk,
               float *out, float *logits, float *topk_logprobs, int64_t *topk_indices, int threads) {
  const int64_t hidden = draft.hidden_size, d = draft.d, q_size = draft.n_heads * d, kv_size = draft.n_kv_heads * d;
  const int64_t input_size = draft.feature_norm ? 2 * hidden : hidden, n_queries = batch.n_sequences * batch.query_len;
  int64_t n_tokens = 0;
  for (int64_t b = 0; b < batch.n_sequences; b++) n_tokens += batch.n_tokens[b];
  static thread_local Scratch scratch;
  // block_input (tokens, input_size): normalized embeddings, for EAGLE-3 followed by normalized features.
  const auto [block_input, normed, k, v, q, buffer, topk_logits] =
      split_scratch<7>(scratch, 1,
                       {n_tokens * input_size, n_queries * input_size, n_tokens * kv_size, n_tokens * kv_size, n_queries * q_size,
                        2 * Scratch::round_up_to_line(n_queries * q_size), topk ? n_queries * draft.head.n_out : 0});

  for (int64_t r = 0; r < n_tokens; r++) {
    rms_norm(batch.embeds + r * hidden, 1, hidden, draft.norm, draft.eps, block_input + r * input_size);
    if (draft.feature_norm) {
      rms_norm(batch.features + r * hidden, 1, hidden, draft.feature_norm, draft.eps, block_input + r * input_size + hidden);
    }
  }
  int64_t row = 0;  // in block_input; out_row: in out
  for (int64_t b = 0, out_row = 0; b < batch.n_sequences; b++) {
    row += batch.n_tokens[b] - batch.query_len;
    for (int64_t t = 0; t < batch.query_len; t++, row++, out_row++) {
      const float *residual = draft.feature_norm ? batch.features + row * hidden : batch.embeds + row * hidden;
      if (draft.norm_before_residual) residual = block_input + row * input_size + input_size - hidden;  // its last part
      std::copy_n(residual, hidden, out + out_row * hidden);
      std::copy_n(block_input + row * input_size, input_size, normed + out_row * input_size);
    }
  }
  const Matrix projections[] = {with_output(draft.k, k, false), with_output(draft.v, v, false), with_output(draft.q, q, false)};
  check(longdraft_linear(block_input, n_tokens, input_size, projections, n_tokens == n_queries ? 3 : 2, 0, threads));
  if (n_tokens != n_queries) check(longdraft_linear(normed, n_queries, input_size, projections + 2, 1, 0, threads));

  row = 0;
  for (int64_t b = 0; b < batch.n_sequences; b++) {
    for (int64_t t = 0; t < batch.n_tokens[b]; t++, row++) {
      const int64_t position = batch.kv_lens[b] - batch.n_tokens[b] + t;
      for (int64_t h = 0; h < draft.n_kv_heads; h++) {
        apply_rope(k + row * kv_size + h * d, batch.cos + row * d, batch.sin + row * d, d, d, buffer);  // buffer is not in use yet
        write_kv(*draft_kv, batch.slots[b], h, position, buffer, v + row * kv_size + h * d, d);
      }
    }
  }
  attend(draft, batch, {*draft_kv, batch.kv_starts, batch.kv_lens, batch.masks, batch.mask_width}, q, buffer, threads);
  add_product(draft.o, q, q_size, out, n_queries, false, threads);

  if (target_kv) {
    rms_norm(out, n_queries, hidden, draft.cross_norm, draft.eps, normed);
    const Matrix matrix = with_output(draft.cross_q, q, false);
    check(longdraft_linear(normed, n_queries, hidden, &matrix, 1, 0, threads));
    attend(draft, batch, {*target_kv, nullptr, batch.target_kv_lens, nullptr, 0}, q, buffer, threads);
    add_product(draft.cross_o, q, q_size, out, n_queries, false, threads);
  }

  compute_mlp(draft, draft.eps, 0, false, nullptr, 0, out, n_queries, false, threads);

  if (draft.final_norm) rms_norm(out, n_queries, hidden, draft.final_norm, draft.eps, normed);
  const Matrix head = with_output(draft.head, topk ? topk_logits : logits, false);
  check(longdraft_linear(draft.final_norm ? normed : out, n_queries, hidden, &head, 1, 0, threads));
  if (!topk) return;
  topk_of_rows(head.y, n_queries, head.n_out, topk, topk_logprobs, topk_indices, threads);
}

}  // namespace

Status longdraft_draft_level(const DraftBlock *draft, const DraftLevelInput *batch, const KVCache *draft_kv, const KVCache *target_kv,
                             int64_t topk, float *out, float *logits, float *topk_logprobs, int64_t *topk_indices, int threads) try {
  Team::with(threads, [=] { run_level(*draft, *batch, draft_kv, target_kv, topk, out, logits, topk_logprobs, topk_indices, threads); });
  return OK;
} CATCH_EXCEPTIONS
