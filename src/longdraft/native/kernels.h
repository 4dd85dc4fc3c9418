// The functions that Python calls, and their structures. header.py reads both from this text: a declaration is on lines
// of its own, a comment begins with two slashes.
#pragma once

#include <cstdint>
#include <new>

// What the functions return. Where memory did not suffice, the results are undefined.
enum [[nodiscard]] Code : int { DONE, NO_MEMORY };

// Ends such a function, because no exception may reach Python.
#define CATCH_NO_MEMORY \
  catch (const std::bad_alloc &) { return NO_MEMORY; }

// Around a call of such a function in C++.
inline void must(Code code) {
  if (code != DONE) throw std::bad_alloc();
}

extern "C" {

// How weights are stored: as floats, in GGUF's blocks of 32 or 256, or in 16 bits. BY_INPUT: float32 (size, outs).
enum class Format : std::int64_t {
  FLOAT32, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4, BF16, F16, BY_INPUT
};

// How keys and values are.
enum class Kept : std::int64_t { FLOAT32, BFLOAT16, INT8 };

// One of several matrices that are multiplied with the same x (rows, size): y = x w^T + bias.
struct Matrix {
  const void *w;       // (outs, size), as `format` says
  const float *bias;   // (outs,) or null
  float *y;            // (rows, outs)
  std::int64_t w_row;  // bytes from one row of w to the next; BY_INPUT, from one input's weights to the next's
  std::int64_t outs;
  std::int64_t adds;  // 1 to add to y, 0 to overwrite it
  Format format;      // of w
  // Whether x is rounded to eight bits for it (products.h), not of floats and halves: 1, or the lanes of a vector if w is woven.
  std::int64_t int8;
};

// How attention weighs keys: by exp(s), s = scale * (q . k), or cap * tanh(s / cap) of it.
struct Scoring {
  float scale;
  float cap;           // 0: scores are not capped
  const float *sinks;  // (query heads,) or null: a score that joins the sum of a row's weights and has no value
};

// A decoder layer of the Llama kind, or of the Gemma kind, whose attention and MLP have norms behind them too.
struct Layer {
  const float *norm, *mlp_norm;            // (hidden,): before the attention and the MLP
  const float *post_attn_norm, *post_mlp_norm;  // (hidden,): of what the attention and the MLP add to x, or null
  const float *q_norm, *k_norm;            // (d,) of each head's queries and keys, or null
  float eps, mlp_eps, attended_eps, done_eps, q_eps, k_eps;
  float plus;  // what is added to the norms' weights
  Scoring scoring;
  Matrix q, k, v, o, gate, up, down;
  std::int64_t hidden, heads, kv_heads, d, inner;
  std::int64_t gelu;   // 1: the MLP's gate goes through GELU by tanh; 0: through SiLU
  std::int64_t gates;  // 1: q also gives d gates behind each head's query; the sigmoids multiply what the head attends to
};

// Consecutive layers, and the norm and head that turn the last output into logits.
struct Stack {
  const Layer *const *layers;   // null where a layer is recurrent
  const struct DeltaLayer *const *deltas;  // null where a layer attends
  const std::int64_t *kinds;   // (count,): which Batch and KeysValues a layer takes
  const std::int64_t *places;  // (count,): which of the layers of these keys and values are its own
  std::int64_t count, size;  // of the layers; hidden
  const float *norm;         // (hidden,)
  float eps, plus;
  float cap;  // logits s become cap * tanh(s / cap); 0: they are not capped
  Matrix head;
};

// T rows of each of B sequences, and where their keys and values lie.
struct Batch {
  std::int64_t sequences, size;       // B, T
  const float *cos, *sin;             // (B, T, turned)
  std::int64_t turned;                // the first dimensions of a head, those that RoPE turns; 0 for none
  const std::int64_t *slots, *first;  // (B,): of the store; the row that a sequence's first new key is written to
  const std::int64_t *ends;           // (B,): keys of a sequence, the new ones included
  const std::uint8_t *masks;          // (B, T, width) or null: which of its last keys a row sees
  const std::int32_t *begins;         // (B, T) or null: the first rank that a row sees, as longdraft_attend counts
  std::int64_t width;
  std::int64_t prompt;  // 1 for causal rows of a prompt, which are computed chunk by chunk
};

// Keys and values of layers: (layers, slots, kv_heads, capacity, d). Strides count numbers.
struct KeysValues {
  void *k, *v;
  std::int64_t k_layer, v_layer, k_slot, k_head, k_row, k_dim, v_slot, v_head, v_row;
  Kept format;               // k_row is 1 with all but FLOAT32
  float *k_scale, *v_scale;  // (layers, slots, kv_heads, capacity): what the numbers of an int8 row are multiplied by; else null
  std::int64_t scale_layer, scale_slot, scale_head;
};

// A draft's block and its head: EAGLE-3's, which joins tokens with features of the target, or LongSpec's, which also attends to
// the target's keys.
struct Draft {
  const float *norm, *feature_norm;                  // (hidden,): of the tokens; of what is joined with them, or null
  const float *cross_norm, *mlp_norm, *final_norm;  // (hidden,); the first one unused, the last one null where there is none
  float eps, scale;                                 // of the norms; of the attentions
  Matrix q, k, v, o, cross_q, cross_o, gate, up, down, head;
  std::int64_t hidden, heads, kv_heads, d, inner;
  std::int64_t normed_residual;  // 1 if the residual of the attention is the normalised joined input
};

// Rows of B sequences, of which the last W are computed to the end, and the keys that those see.
struct Nodes {
  std::int64_t sequences, width;       // B, W
  const std::int64_t *counts, *slots;  // (B,): rows of each sequence; its slot, here and in the target's store
  const float *x, *joined;             // (rows, hidden): embeddings, and what is joined with them
  const float *cos, *sin;              // (rows, d)
  const std::int64_t *begins, *ends;   // (B,): of the draft's own keys, those that are seen; the last are the rows' own
  const std::uint8_t *masks;           // (B, W, seen) or null: which of the last `seen` keys a row sees
  std::int64_t seen;
  const std::int64_t *lengths;  // (B,): of the target's keys, how many are seen
};

// Summaries of a text's chunks of keys: (layers, heads, chunks, d), where a dimension's chunks lie one behind the other.
// Strides count numbers. Null: not kept.
struct Summaries {
  float *largest, *smallest, *mean;
  std::int64_t layer, head, dim;
};

// How chunks are scored (views/scorers.py): the first three kinds read only summaries.
enum class Scorer : std::int64_t { MEAN_KEY, MINMAX, QUEST, TOKENS, ATTENTION, SNAPKV };

// The chunks of a text that are scored, the scorer, and the number of chunks to choose.
struct Choice {
  const float *largest, *smallest, *mean;  // Summaries, of which the kind's are there
  std::int64_t layer, head, dim;
  const KeysValues *kv;         // for the kinds that read all keys: float32
  std::int64_t slot, n, chunk;  // of those; rows of the text, and of a chunk
  std::int64_t layers, heads, group, rows, d;  // KV heads; query heads to each of them; queries of each
  std::int64_t first, behind, count;           // chunks [first, behind) are scored
  Scorer kind;
  std::int64_t most;                           // a chunk's score is its largest of all queries, not their sum: of the first three kinds
};

// A kind of recurrent layer, of which a head's state is (keys, values).
struct Recurrence {
  std::int64_t heads, key_heads, keys, values;  // heads: of values; each head of keys and queries serves as many of them
  std::int64_t corrected;                       // whether a value is corrected by what the state has for its key (delta rule)
  std::int64_t normalised;                      // whether keys and queries are divided by their lengths first
  std::int64_t by_key;                          // whether each key has a decay of its own
  float scale, eps;                             // of queries; beside the squared lengths
  const float *a, *bias, *skip;                 // (heads,) each, of Mamba-2, or null; skip: the part of a value in its output
};

// Inputs of rows, one behind the other.
struct RecurrentRows {
  std::int64_t count;
  const float *q, *k;     // (count, key heads, keys)
  const float *v;         // (count, heads, values)
  const float *g, *beta;  // (count, heads) or with by_key (count, heads, keys): logarithms of decays; (count, heads). With `a`
                          // g is the step size, and beta null.
};

// One sequence: committed rows that its state lacks, and a tree's rows behind them.
struct RecurrentSequence {
  float *state;  // (heads, keys, values); the pending rows are taken into it
  RecurrentRows pending, rows;
  const std::int64_t *parents;       // (rows,): -1 behind the committed rows
  const std::int64_t *order, *inner;  // (needed,): rows to compute, parents first; whether others come behind them
  std::int64_t needed, first;         // rows from `first` on have outputs
  float *out;                         // (rows - first, heads, values)
};

// A short convolution of each channel by itself.
struct Convolution {
  std::int64_t channels, inputs;  // inputs: that a row sees, its own included
  const float *weight, *bias;     // (channels, inputs); (channels,) or null
  std::int64_t silu;              // whether SiLU follows
};

// One sequence: the last inputs before it and those of a tree's rows.
struct ConvolutionSequence {
  const float *window, *rows;  // (inputs - 1, channels), (any, channels)
  const std::int64_t *places;  // (count, inputs): of the window and the rows behind it, those that each row sees
  std::int64_t count;
  float *out;  // (count, channels)
};

// A decoder layer whose mixer is a gated DeltaNet: norm, products, short convolution, delta rule, norm with gate, product; and
// the norm and MLP of a Layer.
struct DeltaLayer {
  const float *norm, *mlp_norm;  // (hidden,)
  const float *out_norm;         // (values,): of each head's output, nothing added to it
  float eps, mlp_eps, out_eps;
  float plus;                    // what is added to the first two norms' weights
  Matrix mixed, z, b, a, o, gate, up, down;  // mixed: queries, keys and values, which are convolved; z: the gates of outputs
  Convolution convolution;
  Recurrence recurrence;  // its key heads are those of the rows that are kept
  const float *decay, *bias;  // (heads,): -exp(A_log), dt_bias
  const std::int64_t *order;  // (heads,): the heads in the order in which o has them, or null
  std::int64_t key_heads;     // of `mixed`
  std::int64_t hidden, inner, gelu;
};

// The rows of B sequences for all recurrent layers.
struct DeltaRows {
  const std::int64_t *const *places;  // (B,): as ConvolutionSequence has them, of each sequence
  float *const *inputs;               // (layers, B): all rows' inputs of the convolution, of which the new ones are written
  const float *const *windows;        // (layers, B)
  RecurrentSequence *sequences;       // (layers, B): of the rows those from `first` on are written; out is not read
};

// Floats that a vector holds.
int longdraft_lanes();

// Sets the OpenMP library's GOMP_parallel, whose threads share the work from then on; null to use only the calling thread.
void longdraft_threads(void (*entry)(void (*)(void *), void *, unsigned, unsigned));

// Multiplies x with several matrices, sharing the outputs among the threads. prompt: whether the rows are a prompt's, of which
// products with matrices in int8 arithmetic are computed in bfloat16 where there are tiles.
Code longdraft_linear(const float *x, std::int64_t rows, std::int64_t size, const Matrix *matrices, std::int64_t count,
                      std::int64_t prompt, int threads);

// Rows [starts[g], starts[g + 1]) of x (starts[count], size) times the matrices of expert experts[g], for each of `count` groups.
// matrices: `each` of every expert, all i-th ones of the same size. y: for each of them (starts[count], outs). Groups are not empty.
Code longdraft_experts(const float *x, std::int64_t size, const Matrix *matrices, std::int64_t each,
                       const std::int64_t *experts, const std::int64_t *starts, std::int64_t count, float *y, int threads);

// Unpacks rows of a stored matrix to floats (rows, size).
Code longdraft_unpack(const void *w, Format format, std::int64_t rows, std::int64_t size, std::int64_t w_row, float *out,
                      int threads);

// Lays rows of a stored matrix, a multiple of the lanes of a vector, as int8 arithmetic reads them (stored.h), in as many bytes.
Code longdraft_weave(const void *w, Format format, std::int64_t outs, std::int64_t size, std::int64_t w_row, void *woven,
                     int threads);

// out, q (heads, rows, d) contiguous, heads those of the KV; row r of a head is row r % mask_rows of the tree.
// kv: n keys and values of a slot; one of k_row and k_dim is 1, and rows of v are contiguous.
// mask (mask_rows, width) or null: which of the last `width` keys a row sees; it sees all before them.
// begins (mask_rows,) or null: the first rank that a row sees. A key before the last `width` has its number as rank; the others
// follow in the order in which the row's path has them. Keys that no row sees are not read.
// What a row gets is, to the bit, what it would get alone, with the keys on its path one after the other.
// d: a multiple of 16.
Code longdraft_attend(const float *q, const KeysValues *kv, std::int64_t slot, std::int64_t heads, std::int64_t rows,
                      std::int64_t d, std::int64_t n, const std::uint8_t *mask, std::int64_t mask_rows,
                      std::int64_t width, const std::int32_t *begins, const Scoring *scoring, float *out, int threads);

// A chunk of a prompt: out, q (heads, rows, d) contiguous, `group` query heads to a KV head; row r sees all but the last
// rows - 1 - r of the n keys, from begins[r] on. kv, begins (rows,) and scoring as above, and so are the bits.
Code longdraft_attend_chunk(const float *q, const KeysValues *kv, std::int64_t slot, std::int64_t heads,
                            std::int64_t group, std::int64_t rows, std::int64_t d, std::int64_t n,
                            const std::int32_t *begins, const Scoring *scoring, float *out, int threads);

// x (B, T, hidden) becomes the layers' output; their keys and values are written where the batches say. Each kind of layer has a
// batch and keys and values of its own; all batches have the same rows. For each layer,
// queries[i] (B, heads, T, d), after RoPE, and hidden[i] (B, T, hidden), its output, or null. Of each row, or of the last of
// a sequence's T rows alone where `last`: logits (rows, vocabulary), or null; and the `best` largest log-probabilities, the
// largest first, with the places of their tokens in the head, unless best is 0.
// rows: of the recurrent layers, or null if there are none.
Code longdraft_stack(const Stack *stack, const Batch *batches, const KeysValues *kv, const DeltaRows *rows, float *x,
                     float *const *queries, float *const *hidden, int last, float *logits, std::int64_t best, float *logprobs,
                     std::int64_t *tokens, int threads);
// Layer `number` of the recurrent ones: x (B, T, hidden) becomes its output. See DeltaRows for what is written.
void longdraft_delta(const DeltaLayer *layer, const DeltaRows *rows, std::int64_t number, std::int64_t sequences,
                     std::int64_t size, float *x, int threads);
// out (B, W, hidden) = the block of the rows that go on, before the last norm; and of each row the `best` largest
// log-probabilities, the largest first, and the places of their tokens in the head, or where best is 0, logits (B, W, outs).
// own: the draft's keys and values, to which those of all rows are written; text: the target's last layer, or null.
Code longdraft_draft(const Draft *draft, const Nodes *nodes, const KeysValues *own, const KeysValues *text,
                     std::int64_t best, float *out, float *logits, float *logprobs, std::int64_t *tokens, int threads);

// Computes rows of recurrent layers. A row's bits do not depend on other rows but those before it on its path.
Code longdraft_recur(const Recurrence *recurrence, const RecurrentSequence *sequences, std::int64_t count, int threads);

// Convolves rows with the inputs that they see.
Code longdraft_convolve(const Convolution *convolution, const ConvolutionSequence *sequences, std::int64_t count, int threads);

// Summarises chunks [from, to) of a slot's keys, float32.
Code longdraft_summarise(const KeysValues *kv, std::int64_t slot, std::int64_t layers, std::int64_t heads, std::int64_t d,
                         std::int64_t chunk, const Summaries *out, std::int64_t from, std::int64_t to, int threads);

// chosen (layers, heads, count): the chunks with the highest scores (views/scorers.py) by the queries (layers, heads, group,
// rows, d), in the text's order; of equal scores the earlier chunk. For softmax masses queries are scaled already.
Code longdraft_choose(const Choice *choice, const float *queries, std::int64_t *chosen, int threads);

// Rows of a slot, float32, in a copy of any format: the first `sink`, the chosen chunks (layers, heads, count), and [window, end), one behind the other.
// held (layers, heads, count): which chunk each place of the copy holds, -1 where it holds none yet. Chosen chunks that are
// there stay in their places, so the copy's chunks need not be in the text's order.
Code longdraft_copy_view(const KeysValues *kv, const KeysValues *copy, std::int64_t slot, std::int64_t layers,
                         std::int64_t heads, std::int64_t d, const std::int64_t *chosen, std::int64_t *held,
                         std::int64_t count, std::int64_t chunk, std::int64_t sink, std::int64_t window, std::int64_t end,
                         int threads);

// Rows [from, from + count) of a slot, float32, which become rows [to, to + count) of its copy, of any format.
Code longdraft_copy_rows(const KeysValues *kv, const KeysValues *copy, std::int64_t slot, std::int64_t layers,
                         std::int64_t heads, std::int64_t d, std::int64_t from, std::int64_t to, std::int64_t count, int threads);
}
