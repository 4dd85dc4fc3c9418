// Runs a decoder layer with a gated DeltaNet in one call: projections, causal convolution, delta rule, gated norm, and the MLP.
#include <vector>
#include "mlp.h"

namespace {

// Copies n_in heads of `size` numbers to n_out heads: each head n_out / n_in times in succession.
void repeat_heads(const float *in, int64_t n_in, int64_t n_out, int64_t size, float *out) {
  for (int64_t h = 0; h < n_out; h++) std::copy_n(in + h / (n_out / n_in) * size, size, out + h * size);
}

}  // namespace

void longdraft_delta_net_layer(const GatedDeltaNetLayer *layer_ptr, const DeltaNetBatch *batch, int64_t index, int64_t n_sequences,
                               int64_t query_len, float *x, int threads) {
  const GatedDeltaNetLayer &layer = *layer_ptr;
  const LinearRecurrence &r = layer.recurrence;
  const int64_t n_tokens = n_sequences * query_len, channels = layer.conv.channels, v_size = r.n_v_heads * r.head_v_dim;
  static thread_local Scratch scratch;
  const auto [normed, qkv, convolved, z, b, a, out] =
      split_scratch<7>(scratch, n_tokens, {layer.hidden_size, channels, channels, v_size, r.n_v_heads, r.n_v_heads, v_size});
  rms_norm(x, n_tokens, layer.hidden_size, layer.norm, layer.eps, normed, layer.norm_offset);
  const Matrix projections[] = {with_output(layer.qkv, qkv, false), with_output(layer.z, z, false), with_output(layer.b, b, false),
                                with_output(layer.a, a, false)};
  check(longdraft_linear(normed, n_tokens, layer.hidden_size, projections, 4, 0, threads));

  static thread_local std::vector<CausalConvSequence> conv_sequences;
  conv_sequences.clear();
  RecurrentSequence *recurrent_sequences = batch->sequences + index * n_sequences;
  for (int64_t s = 0; s < n_sequences; s++) {
    float *conv_inputs = batch->conv_inputs[index * n_sequences + s];
    std::copy_n(qkv + s * query_len * channels, query_len * channels, conv_inputs + recurrent_sequences[s].first_output * channels);
    conv_sequences.push_back({batch->conv_states[index * n_sequences + s], conv_inputs, batch->conv_indices[s], query_len,
                              convolved + s * query_len * channels});
  }
  check(longdraft_causal_conv(&layer.conv, conv_sequences.data(), n_sequences, threads));

  const int64_t k_size = layer.n_k_heads * r.head_k_dim;
  for (int64_t i = 0; i < n_tokens; i++) {
    const RecurrentInputs &tree = recurrent_sequences[i / query_len].tree;
    const int64_t row = recurrent_sequences[i / query_len].first_output + i % query_len;
    const float *from = convolved + i * channels;
    float *g = tree.g + row * r.n_v_heads, *beta = tree.beta + row * r.n_v_heads;
    repeat_heads(from, layer.n_k_heads, r.n_k_heads, r.head_k_dim, tree.q + row * r.n_k_heads * r.head_k_dim);
    repeat_heads(from + k_size, layer.n_k_heads, r.n_k_heads, r.head_k_dim, tree.k + row * r.n_k_heads * r.head_k_dim);
    std::copy_n(from + 2 * k_size, v_size, tree.v + row * v_size);
    for (int64_t h = 0; h < r.n_v_heads; h++) {
      g[h] = layer.neg_exp_a[h] * softplus(a[i * r.n_v_heads + h] + layer.dt_bias[h]);
      beta[h] = 1.0f / (1.0f + std::exp(-b[i * r.n_v_heads + h]));
    }
  }
  for (int64_t s = 0; s < n_sequences; s++) recurrent_sequences[s].out = out + s * query_len * v_size;
  check(longdraft_linear_recurrence(&r, recurrent_sequences, n_sequences, threads));

  rms_norm(out, n_tokens * r.n_v_heads, r.head_v_dim, layer.out_norm, layer.out_eps, out);
  elementwise(out, z, n_tokens, v_size, threads, [](vec y, vec gate) { return y * silu(gate); });
  float *reordered = out;
  if (layer.head_order) {
    reordered = convolved;  // memory that is large enough and no longer in use
    for (int64_t i = 0; i < n_tokens * r.n_v_heads; i++) {
      std::copy_n(out + (i / r.n_v_heads * r.n_v_heads + layer.head_order[i % r.n_v_heads]) * r.head_v_dim, r.head_v_dim,
                  reordered + i * r.head_v_dim);
    }
  }
  add_product(layer.o, reordered, v_size, x, n_tokens, false, threads);
  compute_mlp(layer, layer.mlp_eps, layer.norm_offset, layer.gelu, nullptr, 0, x, n_tokens, false, threads);
}
