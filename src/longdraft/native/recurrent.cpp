// Linear recurrences (gated DeltaNet, Mamba-2) and causal convolutions for trees of tokens: each token starts from its parent's state.
//
// From its parent's state S (head_k_dim, head_v_dim), a token with query q, key k, value v, decay d (one, or one for each key dimension) and
// weight beta computes for each head
//     u = (v - (d S)^T k) beta     or, without the delta rule, u = v beta
//     out = (d S)^T q + (k . q) u  and its own state S' = d S + k u^T.
// So a token reads S once for both products, and writes S' only if it has children. Columns of S are independent: COLUMNS at a time are
// computed for all tokens, and stay in the L1 cache.
#include <vector>
#include "ops.h"

namespace {

constexpr int N_VECTORS = 2;  // vectors of columns that are computed at a time
constexpr int64_t COLUMNS = N_VECTORS * LANES;
constexpr int N_PARTIAL_SUMS = 4;  // partial sums over key dimensions, for each vector

// A token's inputs for one head, prepared for run_token().
struct TokenInputs {
  float *decay, *decayed_key, *key, *decayed_query;  // (head_k_dim,)
  float key_query, beta, skip;                       // k . q; weight of v in u; weight of v in the output (Mamba-2's D)
};

// Computes a dot product, with the same order of additions on every instruction set.
float dot(const float *a, const float *b, int64_t size) {
  float part[16] = {};
  for (int64_t i = 0; i < size; i++) part[i % 16] = fmadd(a[i], b[i], part[i % 16]);
  for (int step = 8; step; step /= 2) {
    for (int i = 0; i < step; i++) part[i] += part[i + step];
  }
  return part[0];
}

// Prepares a token's inputs. memory: for the four arrays of TokenInputs, each rounded up to whole cache lines.
TokenInputs prepare(const LinearRecurrence &r, const RecurrentInputs &inputs, int64_t token, int64_t head, float *memory) {
  const int64_t n = r.head_k_dim, size = Scratch::round_up_to_line(n), k_head = head / (r.n_v_heads / r.n_k_heads);
  const float *q = inputs.q + (token * r.n_k_heads + k_head) * n, *k = inputs.k + (token * r.n_k_heads + k_head) * n;
  TokenInputs out{memory, memory + size, memory + 2 * size, memory + 3 * size, 0.0f, 0.0f, r.d_skip ? r.d_skip[head] : 0.0f};
  float q_scale = r.scale, k_scale = 1.0f;
  if (r.qk_l2norm) {
    q_scale *= 1.0f / std::sqrt(dot(q, q, n) + r.eps);
    k_scale = 1.0f / std::sqrt(dot(k, k, n) + r.eps);
  }
  const float *g = inputs.g + (token * r.n_v_heads + head) * (r.decay_per_key ? n : 1);
  float decay = 0.0f;
  if (r.a) {  // Mamba-2: dt = softplus(g + dt_bias) gives the decay exp(dt A) and the weight of the input
    out.beta = softplus(*g + (r.dt_bias ? r.dt_bias[head] : 0.0f));
    decay = std::exp(out.beta * r.a[head]);
  } else {
    out.beta = inputs.beta[token * r.n_v_heads + head];
    decay = std::exp(*g);
  }
  float *query = out.decayed_query;
  for (int64_t i = 0; i < n; i++) {
    out.key[i] = k[i] * k_scale;
    query[i] = q[i] * q_scale;
  }
  out.key_query = dot(out.key, query, n);  // computed before the decay, which may be 0
  for (int64_t i = 0; i < n; i++) {
    out.decay[i] = r.decay_per_key ? std::exp(g[i]) : decay;
    out.decayed_key[i] = out.decay[i] * out.key[i];
    query[i] *= out.decay[i];
  }
  return out;
}

// Reads COLUMNS columns s (n_keys, COLUMNS) of a state: computes predicted_v = (d S)^T k if DELTA_RULE, and output = (d S)^T q if READS.
template <bool DELTA_RULE, bool READS>
inline void read_state(const float *s, const TokenInputs &token, int64_t n_keys, vec *predicted_v, vec *output) {
  vec v_sums[N_PARTIAL_SUMS][N_VECTORS] = {}, out_sums[N_PARTIAL_SUMS][N_VECTORS] = {};
  const auto add_row = [&](int64_t i, int j) {
    const vec k = broadcast(token.decayed_key[i]), q = broadcast(token.decayed_query[i]);
    UNROLL for (int w = 0; w < N_VECTORS; w++) {
      const vec x = load(s + i * COLUMNS + w * LANES);
      if constexpr (DELTA_RULE) v_sums[j][w] = fmadd(x, k, v_sums[j][w]);
      if constexpr (READS) out_sums[j][w] = fmadd(x, q, out_sums[j][w]);
    }
  };
  int64_t i = 0;
  for (; i + N_PARTIAL_SUMS <= n_keys; i += N_PARTIAL_SUMS) {
    UNROLL for (int j = 0; j < N_PARTIAL_SUMS; j++) add_row(i + j, j);
  }
  for (; i < n_keys; i++) add_row(i, 0);
  UNROLL for (int w = 0; w < N_VECTORS; w++) {
    predicted_v[w] = (v_sums[0][w] + v_sums[1][w]) + (v_sums[2][w] + v_sums[3][w]);
    output[w] = (out_sums[0][w] + out_sums[1][w]) + (out_sums[2][w] + out_sums[3][w]);
  }
}

// Runs one token from the state `before`, for the first n_columns columns. Writes its output to `out` and its state to `after`, unless null.
void run_token(const float *before, float *after, const TokenInputs &token, int64_t n_keys, bool delta_rule, const float *v, float *out,
               int64_t n_columns) {
  vec predicted_v[N_VECTORS], output[N_VECTORS], u[N_VECTORS];
  if (delta_rule) {
    out ? read_state<true, true>(before, token, n_keys, predicted_v, output)
        : read_state<true, false>(before, token, n_keys, predicted_v, output);
  } else {
    out ? read_state<false, true>(before, token, n_keys, predicted_v, output)
        : read_state<false, false>(before, token, n_keys, predicted_v, output);
  }
  UNROLL for (int w = 0; w < N_VECTORS; w++) {
    const int64_t n_lanes = std::max<int64_t>(0, std::min<int64_t>(LANES, n_columns - w * LANES));
    const vec x = n_lanes == LANES ? load(v + w * LANES) : load_partial(v + w * LANES, n_lanes);
    u[w] = (delta_rule ? x - predicted_v[w] : x) * broadcast(token.beta);
    if (!out) continue;
    const vec y = fmadd(x, broadcast(token.skip), fmadd(u[w], broadcast(token.key_query), output[w]));
    n_lanes == LANES ? store(out + w * LANES, y) : store_partial(out + w * LANES, y, n_lanes);
  }
  if (!after) return;
  for (int64_t i = 0; i < n_keys; i++) {
    const vec d = broadcast(token.decay[i]), k = broadcast(token.key[i]);
    UNROLL for (int w = 0; w < N_VECTORS; w++) {
      const int64_t offset = i * COLUMNS + w * LANES;
      store(after + offset, fmadd(u[w], k, load(before + offset) * d));
    }
  }
}

// Copies n_columns columns of a head's state, whose rows are from_stride and to_stride floats apart. pad: fills up to COLUMNS with zeros.
void copy_columns(const float *from, int64_t from_stride, float *to, int64_t to_stride, int64_t n_keys, int64_t n_columns, bool pad) {
  for (int64_t i = 0; i < n_keys; i++) {
    std::memcpy(to + i * to_stride, from + i * from_stride, sizeof(float) * n_columns);
    if (pad) std::memset(to + i * to_stride + n_columns, 0, sizeof(float) * (COLUMNS - n_columns));
  }
}

// Runs one head of one sequence: first the pending tokens, which change the committed state, then the tree.
void run_head(const LinearRecurrence &r, const RecurrentSequence &s, int64_t head) {
  static thread_local Scratch scratch;
  static thread_local std::vector<TokenInputs> prepared;  // of pending tokens, then of the tree's
  const int64_t n = r.head_k_dim, state_size = n * COLUMNS, n_tokens = s.pending.n_tokens + s.tree.n_tokens;
  const int64_t token_size = 4 * Scratch::round_up_to_line(n);
  float *memory = scratch.get(token_size * n_tokens + (s.tree.n_tokens + 1) * state_size), *states = memory + token_size * n_tokens;
  prepared.resize(n_tokens);
  const auto prepare_at = [&](const RecurrentInputs &inputs, int64_t token, int64_t index) {
    prepared[index] = prepare(r, inputs, token, head, memory + token_size * index);
  };
  for (int64_t token = 0; token < s.pending.n_tokens; token++) prepare_at(s.pending, token, token);
  for (int64_t i = 0; i < s.n_computed; i++) prepare_at(s.tree, s.order[i], s.pending.n_tokens + s.order[i]);
  float *head_state = s.state + head * n * r.head_v_dim;
  for (int64_t first = 0; first < r.head_v_dim; first += COLUMNS) {
    const int64_t n_columns = std::min<int64_t>(COLUMNS, r.head_v_dim - first);
    const auto values = [&](const RecurrentInputs &inputs, int64_t token) {
      return inputs.v + (token * r.n_v_heads + head) * r.head_v_dim + first;
    };
    float *current = states;
    copy_columns(head_state + first, r.head_v_dim, current, COLUMNS, n, n_columns, true);
    for (int64_t token = 0; token < s.pending.n_tokens; token++) {
      run_token(current, current, prepared[token], n, r.delta_rule, values(s.pending, token), nullptr, n_columns);
    }
    if (s.pending.n_tokens) copy_columns(current, COLUMNS, head_state + first, r.head_v_dim, n, n_columns, false);
    // `states` has the committed state, then the states of the tree's tokens.
    for (int64_t i = 0; i < s.n_computed; i++) {
      const int64_t token = s.order[i];
      float *out = token < s.first_output ? nullptr : s.out + ((token - s.first_output) * r.n_v_heads + head) * r.head_v_dim + first;
      float *after = s.has_children[i] ? states + (token + 1) * state_size : nullptr;
      const float *before = states + (s.parents[token] + 1) * state_size;
      run_token(before, after, prepared[s.pending.n_tokens + token], n, r.delta_rule, values(s.tree, token), out, n_columns);
    }
  }
}

// Convolves channels [first, end) of all tokens of a sequence.
void convolve_channels(const CausalConv &c, const CausalConvSequence &s, int64_t first, int64_t end) {
  constexpr int MAX_CACHED = 8;  // number of taps (i) whose weights stay in registers
  for (int64_t channel = first; channel < end; channel += LANES) {
    const int64_t n_lanes = std::min<int64_t>(LANES, end - channel);
    const auto load_lanes = [&](const float *p) { return n_lanes == LANES ? load(p) : load_partial(p, n_lanes); };
    const auto weights = [&](int64_t i) {
      float w[LANES] = {};
      for (int64_t l = 0; l < n_lanes; l++) w[l] = c.weight[(channel + l) * c.kernel_size + i];
      return load(w);
    };
    vec cached_weights[MAX_CACHED];
    for (int64_t i = 0; i < std::min<int64_t>(MAX_CACHED, c.kernel_size); i++) cached_weights[i] = weights(i);
    const vec bias = c.bias ? load_lanes(c.bias + channel) : vec{};
    for (int64_t token = 0; token < s.n_tokens; token++) {
      vec y = bias;
      for (int64_t i = 0; i < c.kernel_size; i++) {
        const int64_t position = s.input_indices[token * c.kernel_size + i] - (c.kernel_size - 1);
        const float *x =
            (position < 0 ? s.state + (position + c.kernel_size - 1) * c.channels : s.inputs + position * c.channels) + channel;
        y = fmadd(load_lanes(x), i < MAX_CACHED ? cached_weights[i] : weights(i), y);
      }
      if (c.silu) y = silu(y);
      float *out = s.out + token * c.channels + channel;
      n_lanes == LANES ? store(out, y) : store_partial(out, y, n_lanes);
    }
  }
}

}  // namespace

Status longdraft_linear_recurrence(const LinearRecurrence *recurrence, const RecurrentSequence *sequences, int64_t count, int threads) try {
  const LinearRecurrence &r = *recurrence;
  parallel_for(threads, count * r.n_v_heads, [&](int64_t item) { run_head(r, sequences[item / r.n_v_heads], item % r.n_v_heads); });
  return OK;
} CATCH_EXCEPTIONS

Status longdraft_causal_conv(const CausalConv *convolution, const CausalConvSequence *sequences, int64_t count, int threads) try {
  constexpr int64_t CHANNELS_PER_ITEM = 256;
  const CausalConv &c = *convolution;
  const int64_t items_per_sequence = (c.channels + CHANNELS_PER_ITEM - 1) / CHANNELS_PER_ITEM;
  parallel_for(count * c.channels > 4 * CHANNELS_PER_ITEM ? threads : 1, count * items_per_sequence, [&](int64_t item) {
    const int64_t first = item % items_per_sequence * CHANNELS_PER_ITEM;
    convolve_channels(c, sequences[item / items_per_sequence], first, std::min(c.channels, first + CHANNELS_PER_ITEM));
  });
  return OK;
} CATCH_EXCEPTIONS
