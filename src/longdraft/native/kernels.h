// The functions that Python calls, and their structures. header.py parses this text by regular expressions, so each declaration
// starts a line, and all comments start with two slashes. Shapes are in parentheses; "or null" marks optional pointers.
#pragma once

#include <cstdint>
#include <exception>
#include <new>

// Result of the functions. Unless it is OK, the contents of outputs are undefined.
enum [[nodiscard]] Status : int { OK, OUT_OF_MEMORY, INVALID_ARGUMENT, INTERNAL_ERROR };

struct StatusError : std::exception {
  explicit StatusError(Status status) : status(status) {}
  const Status status;
};

// Ends the body of each function that returns a Status, because no exception may reach Python.
#define CATCH_EXCEPTIONS                                                 \
  catch (const StatusError &error) { return error.status; }              \
  catch (const std::bad_alloc &) { return OUT_OF_MEMORY; }               \
  catch (...) { return INTERNAL_ERROR; }

// Wraps a call from C++ of a function that returns a Status: turns the status into an exception again.
inline void check(Status status) {
  if (status != OK) throw StatusError(status);
}

// Prompts with more tokens than this use several threads between products, and longdraft_attend_prefill.
constexpr std::int64_t FEW_TOKENS = 32;

extern "C" {

// Formats of weights: float32, ggml's quant blocks of 32 or 256 weights, 16-bit floats, and float32 stored as (n_in, n_out).
enum class Format : std::int64_t {
  FLOAT32, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4, BF16, F16, FLOAT32_TRANSPOSED
};

// Element types of the KV cache.
enum class KVDtype : std::int64_t { FLOAT32, BFLOAT16, INT8 };

// A linear layer: y = x w^T + bias for x (rows, n_in).
struct Matrix {
  const void *w;          // weights (n_out, n_in) in `format`
  const float *bias;      // (n_out,) or null
  float *y;               // outputs (rows, n_out)
  std::int64_t w_stride;  // bytes between rows of w, transposed or not
  std::int64_t n_out;
  std::int64_t accumulate;  // 1: y += ..., 0: y = ...
  Format format;
  std::int64_t int8_layout;  // 0: float activations; 1: int8 activations; LANES: int8, and w is interleaved (packed_rows.h)
};

// Attention weights are softmax(s), with s = scale * (q . k), or with softcap * tanh(s / softcap) instead of s.
struct SoftmaxParams {
  float scale;
  float softcap;       // 0: no cap
  const float *sinks;  // (query heads,) or null: each head's additional score in the denominator, which has no value
};

// A decoder layer of the Llama kind, or of the Gemma kind, which has additional norms after the attention and the MLP.
struct DecoderLayer {
  const float *norm, *mlp_norm;                 // (hidden_size,): before the attention and the MLP
  const float *post_attn_norm, *post_mlp_norm;  // (hidden_size,): of their outputs, before the residual is added; or null
  const float *q_norm, *k_norm;                 // (d,): of each head's queries and keys, or null
  float eps, mlp_eps, post_attn_eps, post_mlp_eps, q_eps, k_eps;
  float norm_offset;  // added to the norms' weights (1 for Gemma)
  SoftmaxParams softmax;
  Matrix q, k, v, o, gate, up, down;
  std::int64_t hidden_size, n_heads, n_kv_heads, d, intermediate_size;  // d: head size
  std::int64_t gelu;        // activation of the MLP's gate: 1: GELU by tanh, 0: SiLU
  std::int64_t gated_attn;  // 1: q gives d queries and d gates for each head; sigmoid(gate) scales the head's output
};

// Consecutive layers, and the final norm and head. Layers whose KV is laid out alike form a KV group, as in vLLM.
struct DecoderStack {
  const DecoderLayer *const *layers;              // (n_layers,): null for recurrent layers
  const struct GatedDeltaNetLayer *const *delta_layers;  // (n_layers,): null for attention layers
  const std::int64_t *kv_group;        // (n_layers,): index of the layer's AttentionMetadata and KVCache
  const std::int64_t *index_in_group;  // (n_layers,): the layer's index in its KVCache, or among the recurrent layers
  std::int64_t n_layers, hidden_size;
  const float *norm;  // (hidden_size,): the final norm
  float eps, norm_offset;
  float softcap;  // logits s become softcap * tanh(s / softcap); 0: no cap
  Matrix head;
};

// Positions, slots, lengths and mask of a forward for one KV group: T new tokens in each of B sequences.
struct AttentionMetadata {
  std::int64_t n_sequences, query_len;         // B, T
  const float *cos, *sin;                      // (B, T, rotary_dim)
  std::int64_t rotary_dim;                     // RoPE rotates this many dimensions of a head, from the first on; 0: no RoPE
  const std::int64_t *slots, *kv_write_start;  // (B,): slot in the cache; index of the first new KV entry there
  const std::int64_t *kv_lens;                 // (B,): number of a sequence's KV entries, including new ones
  const std::uint8_t *masks;                   // (B, T, mask_width) or null: which of the last entries a token sees
  const std::int32_t *window_start;            // (B, T) or null: the first rank that a token sees (see longdraft_attend)
  std::int64_t mask_width;
  std::int64_t prefill;  // 1: causal tokens of a prompt
};

// Keys and values of several layers: (layers, slots, n_kv_heads, capacity, d). The integers are strides in elements.
struct KVCache {
  void *k, *v;
  std::int64_t k_layer, v_layer, k_slot, k_head, k_row, k_dim, v_slot, v_head, v_row;
  KVDtype dtype;             // k_row is 1 (K is stored transposed) unless it is FLOAT32
  float *k_scale, *v_scale;  // INT8: (layers, slots, n_kv_heads, capacity), a scale for each entry; else null
  std::int64_t scale_layer, scale_slot, scale_head;
};

// A draft's decoder block and head. EAGLE-3 concatenates token embeddings and features; LongSpec also cross-attends to the
// target's KV.
struct DraftBlock {
  const float *norm, *feature_norm;                 // (hidden_size,): of the embeddings; of EAGLE-3's features, null for LongSpec
  const float *cross_norm, *mlp_norm, *final_norm;  // (hidden_size,); cross_norm is used by LongSpec only, final_norm may be null
  float eps, scale;                                 // of all norms; of the softmax
  Matrix q, k, v, o, cross_q, cross_o, gate, up, down, head;
  std::int64_t hidden_size, n_heads, n_kv_heads, d, intermediate_size;
  std::int64_t norm_before_residual;  // 1: the attention's residual is the normalized input
};

// New tokens of B sequences. KV is written for all of them; only the last W of each sequence have outputs.
struct DraftLevelInput {
  std::int64_t n_sequences, query_len;   // B, W
  const std::int64_t *n_tokens, *slots;  // (B,): number of new tokens; slot in the draft's cache and in the target's
  const float *embeds, *features;        // (tokens, hidden_size)
  const float *cos, *sin;                // (tokens, d)
  const std::int64_t *kv_starts, *kv_lens;  // (B,): a sequence sees entries [start, len) of the draft's KV; the new ones are last
  const std::uint8_t *masks;             // (B, W, mask_width) or null: which of the last entries a token sees
  std::int64_t mask_width;
  const std::int64_t *target_kv_lens;  // (B,): number of the target's KV entries that a sequence sees (LongSpec)
};

// Summaries of chunks of keys (layers, n_kv_heads, chunks, d), each or null. The integers are strides; that of chunks is 1.
struct ChunkSummaries {
  float *max, *min, *mean;
  std::int64_t layer, head, dim;
};

// Scorers of chunks (views/scorers.py): the first three need only summaries.
enum class Scorer : std::int64_t { MEAN_KEY, MINMAX, QUEST, TOKENS, ATTENTION, SNAPKV };

// Selects the chunks of a context with the highest scores.
struct ChunkSelection {
  const float *max, *min, *mean;  // ChunkSummaries that the scorer needs
  std::int64_t layer, head, dim;  // their strides
  const KVCache *kv;              // float32, for scorers that read all keys
  std::int64_t slot, kv_len, chunk_size;
  std::int64_t n_layers, n_kv_heads, group_size, n_queries, d;  // query heads of a KV head; queries of a query head
  std::int64_t first_chunk, end_chunk, n_selected;              // candidates are chunks [first_chunk, end_chunk)
  Scorer scorer;
  std::int64_t use_max;  // reduce over queries by the maximum, not the sum; for the first three scorers
};

// A linear recurrence, whose state is (head_k_dim, head_v_dim) for each head.
struct LinearRecurrence {
  std::int64_t n_v_heads, n_k_heads, head_k_dim, head_v_dim;  // n_v_heads / n_k_heads value heads share a key head
  std::int64_t delta_rule;       // 1: the value that the state returns for the key is subtracted from v first
  std::int64_t qk_l2norm;        // 1: q and k are divided by their L2 norms
  std::int64_t decay_per_key;    // 1: a decay for each key dimension, 0: for each head
  float scale, eps;              // factor of q; added to squared L2 norms
  const float *a, *dt_bias, *d_skip;  // (n_v_heads,): Mamba-2's A, dt_bias and D, or null
};

// Inputs of consecutive tokens.
struct RecurrentInputs {
  std::int64_t n_tokens;
  float *q, *k;     // (n_tokens, n_k_heads, head_k_dim)
  float *v;         // (n_tokens, n_v_heads, head_v_dim)
  float *g, *beta;  // log decay (n_tokens, n_v_heads[, head_k_dim]), weight (n_tokens, n_v_heads). Mamba-2: dt, null.
};

// One sequence: committed tokens that the state does not contain yet (pending), and a tree of new tokens.
struct RecurrentSequence {
  float *state;  // (n_v_heads, head_k_dim, head_v_dim); the pending tokens are added to it
  RecurrentInputs pending, tree;
  const std::int64_t *parents;               // (tree tokens,): index of the parent, -1 for the committed state
  const std::int64_t *order, *has_children;  // (n_computed,): tokens to compute, parents first
  std::int64_t n_computed, first_output;     // tree tokens from first_output on have outputs
  float *out;                                // (tree tokens - first_output, n_v_heads, head_v_dim)
};

// A depthwise causal convolution.
struct CausalConv {
  std::int64_t channels, kernel_size;
  const float *weight, *bias;  // (channels, kernel_size); (channels,) or null
  std::int64_t silu;           // 1: SiLU is applied to the outputs
};

// One sequence: the convolution's state and the inputs of a tree's tokens.
struct CausalConvSequence {
  const float *state, *inputs;       // (kernel_size - 1, channels), (any, channels)
  const std::int64_t *input_indices;  // (n_tokens, kernel_size): each token's inputs, as indices into state and inputs in turn
  std::int64_t n_tokens;
  float *out;  // (n_tokens, channels)
};

// A decoder layer with a gated DeltaNet instead of attention: norm, projections, convolution, delta rule, gated norm, output
// projection; then norm and MLP like a DecoderLayer.
struct GatedDeltaNetLayer {
  const float *norm, *mlp_norm;  // (hidden_size,)
  const float *out_norm;         // (head_v_dim,): of each head's output, without norm_offset
  float eps, mlp_eps, out_eps;
  float norm_offset;
  Matrix qkv, z, b, a, o, gate, up, down;  // z: output gates; b: beta before the sigmoid; a: step before dt_bias
  CausalConv conv;
  LinearRecurrence recurrence;    // n_k_heads: number of heads in the cached q and k
  const float *neg_exp_a, *dt_bias;  // (n_v_heads,): -exp(A_log)
  const std::int64_t *head_order;    // (n_v_heads,): order of the heads in o's input, or null
  std::int64_t n_k_heads;            // number of key heads in `qkv`
  std::int64_t hidden_size, intermediate_size, gelu;
};

// The new tokens of B sequences for all recurrent layers.
struct DeltaNetBatch {
  const std::int64_t *const *conv_indices;  // (B,): CausalConvSequence.input_indices
  float *const *conv_inputs;                // (layers, B): inputs of the convolution; those of new tokens are written
  const float *const *conv_states;          // (layers, B)
  RecurrentSequence *sequences;             // (layers, B): inputs from first_output on are written; out is not read
};

// Number of floats in a SIMD vector.
int longdraft_lanes();

// Sets the OpenMP library's GOMP_parallel, whose threads the kernels use; null: kernels run on the calling thread alone.
void longdraft_threads(void (*entry)(void (*)(void *), void *, unsigned, unsigned));

// Multiplies x (rows, n_in) with several matrices. prefill: x are a prompt's rows; with AMX, bfloat16 arithmetic then replaces
// int8 arithmetic.
Status longdraft_linear(const float *x, std::int64_t rows, std::int64_t n_in, const Matrix *matrices, std::int64_t count,
                        std::int64_t prefill, int threads);

// A grouped GEMM: for each of n_groups groups g, rows [offsets[g], offsets[g + 1]) of x, at least one, times the matrices of expert
// expert_ids[g]. matrices (experts, per_expert); the i-th of all experts have one size. y: (rows, n_out) for each i.
Status longdraft_grouped_gemm(const float *x, std::int64_t n_in, const Matrix *matrices, std::int64_t per_expert,
                              const std::int64_t *expert_ids, const std::int64_t *offsets, std::int64_t n_groups, float *y,
                              int threads);

// Dequantizes a matrix to float32 (n_out, n_in).
Status longdraft_dequantize(const void *w, Format format, std::int64_t n_out, std::int64_t n_in, std::int64_t w_stride, float *out,
                            int threads);

// Interleaves groups of LANES rows (packed_rows.h); n_out is a multiple of LANES. repacked has as many bytes as w.
Status longdraft_repack(const void *w, Format format, std::int64_t n_out, std::int64_t n_in, std::int64_t w_stride, void *repacked,
                        int threads);

// Attention to n_kv entries of a slot. out, q (n_kv_heads, rows, d), d a multiple of 16; row r is tree token r % mask_rows.
// kv: k_row or k_dim is 1, values are contiguous.
// mask (mask_rows, mask_width) or null: which of the last entries a token sees; it sees all entries before them.
// window_start (mask_rows,) or null: the first rank that a token sees. An entry's rank is its index; among the last mask_width,
// entries on the token's path are counted alone. Entries that no token sees are not read.
// A row has the bits of plain decoding: as if it were alone, and the entries on its path consecutive.
Status longdraft_attend(const float *q, const KVCache *kv, std::int64_t slot, std::int64_t n_kv_heads, std::int64_t rows,
                        std::int64_t d, std::int64_t n_kv, const std::uint8_t *mask, std::int64_t mask_rows,
                        std::int64_t mask_width, const std::int32_t *window_start, const SoftmaxParams *softmax, float *out,
                        int threads);

// Causal attention of a prompt's chunk, whose entries are the last of n_kv. out, q (n_heads, rows, d). All other arguments, and
// the bits of a row, are those of longdraft_attend.
Status longdraft_attend_prefill(const float *q, const KVCache *kv, std::int64_t slot, std::int64_t n_heads,
                                std::int64_t group_size, std::int64_t rows, std::int64_t d, std::int64_t n_kv,
                                const std::int32_t *window_start, const SoftmaxParams *softmax, float *out, int threads);

// Runs decoder layers: their output overwrites x (B, T, hidden_size), and KV is written. metadata, kv: one for each KV group.
// queries, hidden: for each layer its queries after RoPE (B, n_heads, T, d) and its output (B, T, hidden_size), each or null.
// logits (rows, vocab_size) or null, of the last `n_last` tokens of each sequence (0: of all); with topk > 0 instead topk_logprobs
// and topk_indices (rows of the head), the largest first.
// delta_batch: the tokens for recurrent layers, or null.
Status longdraft_stack(const DecoderStack *stack, const AttentionMetadata *metadata, const KVCache *kv,
                       const DeltaNetBatch *delta_batch, float *x, float *const *queries, float *const *hidden, int n_last,
                       float *logits, std::int64_t topk, float *topk_logprobs, std::int64_t *topk_indices, int threads);

// Runs recurrent layer number `index`: its output overwrites x (B, T, hidden_size). Writes inputs into the DeltaNetBatch too.
void longdraft_delta_net_layer(const GatedDeltaNetLayer *layer, const DeltaNetBatch *batch, std::int64_t index,
                               std::int64_t n_sequences, std::int64_t query_len, float *x, int threads);

// Runs a draft on one level of its tree. out (B, W, hidden_size): the block's output before the final norm. With topk > 0 also
// topk_logprobs and topk_indices (rows of the head), the largest first; else logits (B, W, vocab_size).
// draft_kv: the KV of all tokens is written there. target_kv: KV of the target's last layer (LongSpec), or null.
Status longdraft_draft_level(const DraftBlock *draft, const DraftLevelInput *batch, const KVCache *draft_kv, const KVCache *target_kv,
                             std::int64_t topk, float *out, float *logits, float *topk_logprobs, std::int64_t *topk_indices,
                             int threads);

// Runs a recurrence on several sequences. A token's bits depend only on its path: the tokens from the root to it.
Status longdraft_linear_recurrence(const LinearRecurrence *recurrence, const RecurrentSequence *sequences, std::int64_t count,
                                   int threads);

Status longdraft_causal_conv(const CausalConv *conv, const CausalConvSequence *sequences, std::int64_t count, int threads);

// Summarizes chunks [from, to) of a slot's float32 keys.
Status longdraft_summarize_chunks(const KVCache *kv, std::int64_t slot, std::int64_t n_layers, std::int64_t n_kv_heads,
                                  std::int64_t d, std::int64_t chunk_size, const ChunkSummaries *out, std::int64_t from,
                                  std::int64_t to, int threads);

// chunk_ids (n_layers, n_kv_heads, n_selected): ids of the chunks with the highest scores, ascending; of equal scores the earlier
// wins. queries (n_layers, n_kv_heads, group_size, n_queries, d), multiplied by the softmax scale for ATTENTION and SNAPKV.
Status longdraft_select_chunks(const ChunkSelection *selection, const float *queries, std::int64_t *chunk_ids, int threads);

// Copies float32 entries of a slot to a view of any dtype: the first `sink`, the selected chunks, and [window, end), in this order.
// chunk_ids, resident (n_layers, n_kv_heads, n_chunks): ids of the selected chunks; ids of the chunks in the view, or -1. Selected
// chunks that are resident stay in place, so the view's chunks need not be ascending.
Status longdraft_copy_view(const KVCache *kv, const KVCache *view, std::int64_t slot, std::int64_t n_layers,
                           std::int64_t n_kv_heads, std::int64_t d, const std::int64_t *chunk_ids, std::int64_t *resident,
                           std::int64_t n_chunks, std::int64_t chunk_size, std::int64_t sink, std::int64_t window, std::int64_t end,
                           int threads);

// Copies float32 entries [from, from + count) of a slot to [to, to + count) of a view of any dtype.
Status longdraft_copy_entries(const KVCache *kv, const KVCache *view, std::int64_t slot, std::int64_t n_layers,
                              std::int64_t n_kv_heads, std::int64_t d, std::int64_t from, std::int64_t to, std::int64_t count,
                              int threads);
}
