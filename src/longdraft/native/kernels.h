// The functions that Python calls, and their structures. header.py parses this file by regular expressions, so each declaration
// starts a line, and each comment starts with two slashes. Shapes are in parentheses; "or null" marks optional pointers.
// B: number of sequences. T: number of new tokens in each. d: size of a head. A slot is a sequence's part of the KV cache.
#pragma once

#include "formats.h"
#include <cstdint>
#include <exception>
#include <new>

// What the functions return. Outputs are undefined unless it is OK.
enum [[nodiscard]] Status : int { OK, OUT_OF_MEMORY, INVALID_ARGUMENT, INTERNAL_ERROR };

struct StatusError : std::exception {
  explicit StatusError(Status status) : status(status) {}
  const Status status;
};

// Ends the body of each function that returns a Status, because no exception may reach Python.
#define CATCH_EXCEPTIONS                                   \
  catch (const StatusError &error) { return error.status; } \
  catch (const std::bad_alloc &) { return OUT_OF_MEMORY; } catch (...) { return INTERNAL_ERROR; }

// Throws an error status as an exception. C++ code wraps its calls of functions that return a Status in it.
inline void check(Status status) {
  if (status != OK) throw StatusError(status);
}

// Prompts of more tokens than this use longdraft_attend_prefill, and several threads between matrix products.
constexpr std::int64_t FEW_TOKENS = 32;

// The KV cache's INT4 (int4_kv.h): pairs of numbers of a key in eight bits, and pairs of numbers that share a scale.
constexpr std::int64_t INT4_SLOW_PAIRS = 16;
constexpr std::int64_t INT4_GROUP_PAIRS = 16;

extern "C" {

// Element types of the KV cache. The elements of INT4 are bytes.
enum class KVDtype : std::int64_t { FLOAT32, BFLOAT16, INT8, INT4 };

// A linear layer, y = x w^T + bias for x (rows, n_in): its weight matrix, its bias, and the memory for its outputs.
struct Matrix {
  const void *w;          // weights (n_out, n_in) in `format`
  const float *bias;      // (n_out,) or null
  float *y;               // outputs (rows, n_out)
  std::int64_t w_stride;  // bytes between rows of w, transposed or not
  std::int64_t n_out;
  std::int64_t accumulate;  // 1: y += ..., 0: y = ...
  Format format;
  std::int64_t int8_layout;  // 0: float activations; 1: int8 activations; LANES: int8 activations and interleaved w (packed_rows.h)
};

// Attention weights are softmax(s) with s = scale * (q . k). With a softcap, s is replaced by softcap * tanh(s / softcap).
struct SoftmaxParams {
  float scale;
  float softcap;       // 0: no cap
  const float *sinks;  // (n_heads,) or null: an additional score of each query head, which has no value: it is in the denominator only
};

// A decoder layer like Llama's, or like Gemma's, which has additional norms after the attention and the MLP.
struct DecoderLayer {
  const float *norm, *mlp_norm;                 // (hidden_size,): weights of the norms before the attention and before the MLP
  const float *post_attn_norm, *post_mlp_norm;  // (hidden_size,) or null: of the norms after them, before the residual is added
  const float *q_norm, *k_norm;                 // (d,) or null: of the norms of each head's queries and keys
  float eps, mlp_eps, post_attn_eps, post_mlp_eps, q_eps, k_eps;
  float norm_offset;  // added to all weights of norms (1 for Gemma)
  SoftmaxParams softmax;
  Matrix q, k, v, o, gate, up, down;
  std::int64_t hidden_size, n_heads, n_kv_heads, d, intermediate_size;
  std::int64_t gelu;        // activation of the MLP's gate: 1: GELU by tanh; 0: SiLU
  std::int64_t gated_attn;  // 1: q has 2 d outputs for each head, a query and a gate; sigmoid(gate) scales the head's output
};

// Consecutive layers, the final norm and the LM head. A KV group consists of layers whose KV has one layout, as in vLLM.
struct DecoderStack {
  const DecoderLayer *const *layers;              // (n_layers,): null for recurrent layers
  const struct GatedDeltaNetLayer *const *delta_layers;  // (n_layers,): null for attention layers
  const std::int64_t *kv_group;        // (n_layers,): index of the layer's AttentionMetadata and KVCache
  const std::int64_t *index_in_group;  // (n_layers,): the layer's index in its KVCache, or its number among the recurrent layers
  std::int64_t n_layers, hidden_size;
  const float *norm;  // (hidden_size,): the final norm
  float eps, norm_offset;
  float softcap;  // logits s become softcap * tanh(s / softcap); 0: no cap
  Matrix head;
};

// Positions, slots, lengths and mask of a forward's new tokens, for one KV group.
struct AttentionMetadata {
  std::int64_t n_sequences, query_len;         // B, T
  const float *cos, *sin;                      // (B, T, rotary_dim)
  std::int64_t rotary_dim;                     // RoPE rotates the first rotary_dim dimensions of a head; 0: no RoPE
  const std::int64_t *slots, *kv_write_start;  // (B,): slot in the cache; index of the first new KV entry there
  const std::int64_t *kv_lens;                 // (B,): number of a sequence's KV entries, including new ones
  const std::uint8_t *masks;                   // (B, T, mask_width) or null: mask of longdraft_attend for each sequence
  const std::int32_t *window_start;            // (B, T) or null: window_start of longdraft_attend for each sequence
  std::int64_t mask_width;
  std::int64_t prefill;  // 1: causal tokens of a prompt
  std::int64_t n_first;  // n_first of longdraft_attend_prefill
};

// Keys and values of several layers: (layers, slots, n_kv_heads, capacity, d). Strides are in elements; a row is an entry's key or value.
struct KVCache {
  void *k, *v;
  std::int64_t k_layer_stride, v_layer_stride, k_slot_stride, k_head_stride, k_row_stride, k_dim_stride;
  std::int64_t v_slot_stride, v_head_stride, v_row_stride;  // the stride of v's dimensions is 1
  KVDtype dtype;             // unless it is FLOAT32, K is stored transposed: k_row_stride is 1
  float *k_scale, *v_scale;  // (layers, slots, n_kv_heads, capacity): INT8's scale for each entry; null for other dtypes
  std::int64_t scale_layer_stride, scale_slot_stride, scale_head_stride;
};

// A draft's decoder block and head. EAGLE-3 concatenates token embeddings and features; LongSpec also cross-attends to the target's KV.
struct DraftBlock {
  const float *norm, *feature_norm;                 // (hidden_size,): norms of embeddings and of EAGLE-3's features (null for LongSpec)
  const float *cross_norm, *mlp_norm, *final_norm;  // (hidden_size,): cross_norm is LongSpec's only; final_norm may be null
  float eps, scale;                                 // eps of all norms; scale of the softmax
  Matrix q, k, v, o, cross_q, cross_o, gate, up, down, head;
  std::int64_t hidden_size, n_heads, n_kv_heads, d, intermediate_size;
  std::int64_t norm_before_residual;  // 1: the attention's residual is the normalized input
};

// New tokens of B sequences. The KV of all new tokens is written, but only the last W tokens of each sequence have outputs.
struct DraftLevelInput {
  std::int64_t n_sequences, query_len;   // B, W
  const std::int64_t *n_tokens, *slots;  // (B,): number of new tokens; slot in both the draft's and the target's cache
  const float *embeds, *features;        // (tokens, hidden_size)
  const float *cos, *sin;                // (tokens, d)
  const std::int64_t *kv_starts, *kv_lens;  // (B,): a sequence sees entries [start, len) of the draft's KV; new tokens are the last
  const std::uint8_t *masks;             // (B, W, mask_width) or null: mask of longdraft_attend for each sequence
  std::int64_t mask_width;
  const std::int64_t *target_kv_lens;  // (B,): LongSpec: number of the target's KV entries that a sequence sees; else null
};

// Summaries of chunks of keys in each dimension: (layers, n_kv_heads, chunks, d), each or null. The stride of chunks is 1.
struct ChunkSummaries {
  float *max, *min, *mean;
  std::int64_t layer_stride, head_stride, dim_stride;
};

// Scorers of chunks (views/scorers.py): the first three need only summaries.
enum class Scorer : std::int64_t { MEAN_KEY, MINMAX, QUEST, TOKENS, ATTENTION, SNAPKV };

// Selects the chunks of a context with the highest scores.
struct ChunkSelection {
  const float *max, *min, *mean;  // as in ChunkSummaries; null if the scorer does not need them
  std::int64_t layer_stride, head_stride, dim_stride;
  const KVCache *kv;              // float32, for scorers that read all keys
  std::int64_t slot, kv_len, chunk_size;
  std::int64_t n_layers, n_kv_heads, group_size, n_queries, d;  // group_size: query heads of a KV head; n_queries: of a query head
  std::int64_t first_chunk, end_chunk, n_selected;              // candidates are chunks [first_chunk, end_chunk)
  Scorer scorer;
  std::int64_t use_max;  // scores of a query head's queries are reduced: 1: to their maximum (first three scorers only); 0: to their sum
};

// A linear recurrence (recurrent.cpp) with a state (head_k_dim, head_v_dim) for each value head.
struct LinearRecurrence {
  std::int64_t n_v_heads, n_k_heads, head_k_dim, head_v_dim;  // n_v_heads / n_k_heads value heads share a key head
  std::int64_t delta_rule;       // 1: the value that the state predicts for the key is first subtracted from v; 0: v is used as it is
  std::int64_t qk_l2norm;        // 1: q and k are divided by their L2 norms; 0: not
  std::int64_t decay_per_key;    // 1: one decay for each key dimension; 0: one for each head
  float scale, eps;              // scale: factor of q; eps: added to squared L2 norms
  const float *a, *dt_bias, *d_skip;  // (n_v_heads,): Mamba-2's A, dt_bias and D, or null
};

// Inputs of consecutive tokens.
struct RecurrentInputs {
  std::int64_t n_tokens;
  float *q, *k;     // (n_tokens, n_k_heads, head_k_dim)
  float *v;         // (n_tokens, n_v_heads, head_v_dim)
  float *g;         // log decay (n_tokens, n_v_heads), or with decay_per_key (n_tokens, n_v_heads, head_k_dim); for Mamba-2 dt
  float *beta;      // weight of v (n_tokens, n_v_heads); null for Mamba-2
};

// One sequence: its state, its pending tokens (committed, but not yet in the state), and a tree of new tokens.
struct RecurrentSequence {
  float *state;  // (n_v_heads, head_k_dim, head_v_dim); the pending tokens are added to it
  RecurrentInputs pending, tree;
  const std::int64_t *parents;               // (tree tokens,): index of the parent; -1 if the token follows the committed tokens
  const std::int64_t *order, *has_children;  // (n_computed,): tree tokens to compute, parents first; 1 if a child is computed too
  std::int64_t n_computed, first_output;     // tree tokens from index first_output on have outputs
  float *out;                                // (tree tokens - first_output, n_v_heads, head_v_dim)
};

// A depthwise causal convolution.
struct CausalConv {
  std::int64_t channels, kernel_size;
  const float *weight, *bias;  // (channels, kernel_size); (channels,) or null
  std::int64_t silu;           // 1: SiLU is applied to the outputs
};

// One sequence: the convolution's state (inputs of the last committed tokens) and the inputs of newer tokens.
struct CausalConvSequence {
  const float *state, *inputs;        // (kernel_size - 1, channels); (number of inputs, channels)
  const std::int64_t *input_indices;  // (n_tokens, kernel_size): each token's inputs, as indices into [state, inputs] concatenated
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
  Matrix qkv, z, b, a, o, gate, up, down;  // z: gates of the output; beta = sigmoid(b); log decay = -exp(A_log) softplus(a + dt_bias)
  CausalConv conv;
  LinearRecurrence recurrence;    // n_k_heads: number of heads in the cached q and k
  const float *neg_exp_a, *dt_bias;  // (n_v_heads,); neg_exp_a = -exp(A_log)
  const std::int64_t *head_order;    // (n_v_heads,) or null: head_order[i] is the value head at place i of o's input
  std::int64_t n_k_heads;            // number of key heads in `qkv`
  std::int64_t hidden_size, intermediate_size, gelu;
};

// The new tokens of B sequences for all recurrent layers.
struct DeltaNetBatch {
  const std::int64_t *const *conv_indices;  // (B,): CausalConvSequence.input_indices
  float *const *conv_inputs;                // (layers, B): CausalConvSequence.inputs; the kernel writes those of new tokens
  const float *const *conv_states;          // (layers, B): CausalConvSequence.state
  RecurrentSequence *sequences;             // (layers, B): the kernel sets `out`, and writes the tree's inputs from first_output on
};

// Number of floats in a SIMD vector.
int longdraft_lanes();

// Sets the OpenMP library's GOMP_parallel, whose threads the kernels use; null: kernels run on the calling thread alone.
void longdraft_set_parallel_entry(void (*entry)(void (*)(void *), void *, unsigned, unsigned));

// Multiplies x (rows, n_in) with several matrices. prefill: 1: rows are a prompt's tokens; AMX then computes in bfloat16, not in int8.
Status longdraft_linear(const float *x, std::int64_t rows, std::int64_t n_in, const Matrix *matrices, std::int64_t count,
                        std::int64_t prefill, int threads);

// A grouped GEMM: multiplies each group g of rows, [offsets[g], offsets[g + 1]) of x, with the per_expert matrices of expert
// expert_ids[g]. A group has at least one row. matrices (experts, per_expert): matrix i has one size for all experts, and outputs
// (rows, n_out). y: the outputs of matrix 0, then of matrix 1, ...
Status longdraft_grouped_gemm(const float *x, std::int64_t n_in, const Matrix *matrices, std::int64_t per_expert,
                              const std::int64_t *expert_ids, const std::int64_t *offsets, std::int64_t n_groups, float *y, int threads);

// Dequantizes a matrix to float32 (n_out, n_in).
Status longdraft_dequantize(const void *w, Format format, std::int64_t n_out, std::int64_t n_in, std::int64_t w_stride, float *out,
                            int threads);

// Interleaves groups of LANES rows (packed_rows.h); n_out is a multiple of LANES. repacked has as many bytes as w.
Status longdraft_repack(const void *w, Format format, std::int64_t n_out, std::int64_t n_in, std::int64_t w_stride, void *repacked,
                        int threads);

// Attention to the first n_kv entries of a slot. q, out (n_kv_heads, rows, d), d a multiple of 16; row r belongs to tree token
// r % mask_rows. kv: k_row_stride or k_dim_stride is 1.
// mask (mask_rows, mask_width) or null: mask[t][j] is 1 if token t sees entry j of the last mask_width. It sees all entries before these.
// window_start (mask_rows,) or null: the lowest rank that a token sees, where ranks number the entries that it sees without a window.
// Entries that no token sees are not read.
// Each row has the bits of plain decoding, where the token's path is the sequence: its entries are consecutive, and it is the only row.
Status longdraft_attend(const float *q, const KVCache *kv, std::int64_t slot, std::int64_t n_kv_heads, std::int64_t rows, std::int64_t d,
                        std::int64_t n_kv, const std::uint8_t *mask, std::int64_t mask_rows, std::int64_t mask_width,
                        const std::int32_t *window_start, const SoftmaxParams *softmax, float *out, int threads);

// Causal attention of a chunk of a prompt: of `rows` tokens, whose entries are the last of n_kv. q, out (n_heads, rows, d). All tokens
// also see the first n_first entries before their window. Other arguments and the bits of a row are as in longdraft_attend.
Status longdraft_attend_prefill(const float *q, const KVCache *kv, std::int64_t slot, std::int64_t n_heads,
                                std::int64_t group_size, std::int64_t rows, std::int64_t d, std::int64_t n_kv,
                                const std::int32_t *window_start, std::int64_t n_first, const SoftmaxParams *softmax, float *out,
                                int threads);

// Runs decoder layers on x (B, T, hidden_size): overwrites x by the last layer's output, and writes the new tokens' KV.
// metadata, kv: one for each KV group. delta_batch: the tokens for recurrent layers, or null.
// queries, hidden: for each layer, memory for its queries after RoPE (B, n_heads, T, d) and for its output (B, T, hidden_size), or null.
// logits: (tokens, vocab_size) of the last n_last tokens of each sequence (0: of all), or null. If topk > 0, writes instead the topk
// largest log-probabilities and their rows of the head, the largest first, to topk_logprobs and topk_indices (tokens, topk).
Status longdraft_stack(const DecoderStack *stack, const AttentionMetadata *metadata, const KVCache *kv,
                       const DeltaNetBatch *delta_batch, float *x, float *const *queries, float *const *hidden, int n_last,
                       float *logits, std::int64_t topk, float *topk_logprobs, std::int64_t *topk_indices, int threads);

// Runs recurrent layer number `index`: overwrites x (B, T, hidden_size) by its output, and writes the new tokens' inputs to the batch.
void longdraft_delta_net_layer(const GatedDeltaNetLayer *layer, const DeltaNetBatch *batch, std::int64_t index,
                               std::int64_t n_sequences, std::int64_t query_len, float *x, int threads);

// Runs a draft's block on one level of its tree. out (B, W, hidden_size): the block's output before the final norm. If topk > 0, writes
// topk_logprobs and topk_indices (rows of the head) (B, W, topk), the largest first; else logits (B, W, vocab_size).
// draft_kv: the KV of all new tokens is written there. target_kv: KV of the target's last layer for LongSpec, else null.
Status longdraft_draft_level(const DraftBlock *draft, const DraftLevelInput *batch, const KVCache *draft_kv, const KVCache *target_kv,
                             std::int64_t topk, float *out, float *logits, float *topk_logprobs, std::int64_t *topk_indices, int threads);

// Runs a recurrence on several sequences. A token's bits depend only on the tokens of its path.
Status longdraft_linear_recurrence(const LinearRecurrence *recurrence, const RecurrentSequence *sequences, std::int64_t count, int threads);

Status longdraft_causal_conv(const CausalConv *conv, const CausalConvSequence *sequences, std::int64_t count, int threads);

// Summarizes chunks [begin, end) of a slot's float32 keys.
Status longdraft_summarize_chunks(const KVCache *kv, std::int64_t slot, std::int64_t n_layers, std::int64_t n_kv_heads, std::int64_t d,
                                  std::int64_t chunk_size, const ChunkSummaries *out, std::int64_t begin, std::int64_t end, int threads);

// Writes the ids of the chunks with the highest scores, ascending, to chunk_ids (n_layers, n_kv_heads, n_selected); of equal scores, the
// earlier chunk wins. queries (n_layers, n_kv_heads, group_size, n_queries, d): multiplied by the softmax scale for ATTENTION and SNAPKV.
Status longdraft_select_chunks(const ChunkSelection *selection, const float *queries, std::int64_t *chunk_ids, int threads);

// Copies a slot's float32 entries to a view of any dtype: the first n_sink, then the selected chunks, then [window_begin, window_end).
// chunk_ids (n_layers, n_kv_heads, n_chunks): ids of the selected chunks. resident, of this shape: ids of the chunks in the view (-1: none),
// which are updated. A selected chunk that is resident is not copied but stays in place, so the view's chunks need not be ascending.
Status longdraft_copy_view(const KVCache *kv, const KVCache *view, std::int64_t slot, std::int64_t n_layers, std::int64_t n_kv_heads,
                           std::int64_t d, const std::int64_t *chunk_ids, std::int64_t *resident, std::int64_t n_chunks,
                           std::int64_t chunk_size, std::int64_t n_sink, std::int64_t window_begin, std::int64_t window_end, int threads);

// Copies float32 entries [from, from + count) of a slot to [to, to + count) of a view of any dtype.
Status longdraft_copy_entries(const KVCache *kv, const KVCache *view, std::int64_t slot, std::int64_t n_layers, std::int64_t n_kv_heads,
                              std::int64_t d, std::int64_t from, std::int64_t to, std::int64_t count, int threads);
}
