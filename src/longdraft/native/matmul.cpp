// Multiplies activations with several matrices, and groups of rows with their experts' matrices, in one parallel loop over all outputs.
#include "matmul.h"

#include "ops.h"
#include "isa/amx.h"
#include <vector>

namespace {

// Numbers of outputs that a work item computes.
constexpr int64_t FLOAT_OUTPUTS = 24;                            // with float activations: a multiple of every tile's outputs
constexpr int64_t FEW_ROWS_OUTPUTS = 2 * INT8_OUTPUT_MULTIPLE;   // with int8 activations of at most ROW_GROUP rows
constexpr int64_t MANY_ROWS_OUTPUTS = 8 * INT8_OUTPUT_MULTIPLE;  // with int8 activations of more rows
constexpr int64_t PREFILL_OUTPUTS = 16 * INT8_OUTPUT_MULTIPLE;   // in prefill

// Splits the outputs of all matrices into ranges of at most range_size. Calls f(matrix, its index, from, to) for each on several threads.
template <typename F> void for_output_ranges(int64_t range_size, const Matrix *matrices, int64_t count, int threads, const F &f) {
  const auto ranges_of = [=](const Matrix &m) { return (m.n_out + range_size - 1) / range_size; };
  int64_t n_ranges = 0;
  for (int64_t i = 0; i < count; i++) n_ranges += ranges_of(matrices[i]);
  parallel_for(threads, n_ranges, [&](int64_t index) {
    const Matrix *m = matrices;
    for (; index >= ranges_of(*m); m++) index -= ranges_of(*m);
    f(*m, m - matrices, index * range_size, std::min(m->n_out, (index + 1) * range_size));
  });
}

// Returns which activations a quantized matrix needs: 0: those with a scale for 32 numbers; 1: with a scale for 128.
int64_t act_scale_kind(const Matrix &m) { return sub_blocks_per_act_scale(m.format) > 1; }

// Groups of rows of x, quantized to int8, and their memory. Group g consists of rows [offsets[g], offsets[g + 1]).
struct QuantizedGroups {
  std::vector<Int8Activations> groups;
  Scratch qs_scratch, blocks_scratch;

  void quantize(const float *x, int64_t n_in, int64_t sub_blocks_per_act_scale, const int64_t *offsets, int64_t n_groups,
                int threads) {
    groups.clear();
    int64_t n_padded = 0;
    for (int64_t g = 0; g < n_groups; g++) {
      groups.push_back(int8_activations(offsets[g + 1] - offsets[g], n_in, sub_blocks_per_act_scale));
      n_padded += groups[g].padded_rows();
    }
    auto *qs = reinterpret_cast<std::int8_t *>(qs_scratch.get(n_padded * n_in / 4));
    auto *blocks =
        reinterpret_cast<Int8Activations::Block *>(blocks_scratch.get(n_padded * (n_in / 32) * sizeof(Int8Activations::Block) / 4));
    for (Int8Activations &group : groups) {
      group.qs = qs;
      group.blocks = blocks;
      qs += group.padded_rows() * n_in;
      blocks += group.padded_rows() * (n_in / 32);
    }
    const Int8Activations *activations = groups.data();
    parallel_for(threads, n_groups, [=](int64_t g) { quantize_rows(x + offsets[g] * n_in, activations[g], n_groups > 1 ? 1 : threads); });
  }
};

// Returns activations of these sizes in bfloat16, whose values are still to be written. Their memory is from `scratch`.
Bf16Activations bf16_activations(int64_t rows, int64_t n_in, Scratch &scratch) {
  Bf16Activations bf16{nullptr, rows, n_in};
  bf16.values = reinterpret_cast<BFloat16 *>(scratch.get(bf16.padded_rows() * n_in / 2));
  return bf16;
}

// Multiplies a prompt's rows with several matrices: with quantized ones in bfloat16 on AMX, with all others in float32.
void multiply_prefill(const float *x, const Bf16Activations &bf16, const Matrix *matrices, int64_t count, int threads) {
  for_output_ranges(PREFILL_OUTPUTS, matrices, count, threads, [&](const Matrix &m, int64_t, int64_t from, int64_t to) {
    if (m.int8_layout) return bf16_outputs(bf16, m, from, to);
    float_outputs(x, bf16.rows, bf16.n_in, m, from, to);
  });
}

// Multiplies each group of rows, [offsets[g], offsets[g + 1]) of x, with per_group matrices: matrices (n_groups, per_group).
void multiply_groups(const float *x, int64_t n_in, const Matrix *matrices, int64_t per_group, const int64_t *offsets, int64_t n_groups,
                     int threads) {
  const Matrix *end = matrices + n_groups * per_group;
  int64_t max_rows = 0;
  for (int64_t g = 0; g < n_groups; g++) max_rows = std::max(max_rows, offsets[g + 1] - offsets[g]);
  static thread_local QuantizedGroups quantized[2];
  bool any_int8 = false, any_amx = false;
  for (int64_t kind = 0; kind < 2; kind++) {
    const auto matches = [=](const Matrix &m) { return m.int8_layout && act_scale_kind(m) == kind; };
    const Matrix *first = std::find_if(matrices, end, matches);
    if (first == end) continue;
    quantized[kind].quantize(x, n_in, sub_blocks_per_act_scale(first->format), offsets, n_groups, threads);
    any_int8 = true;
    for (const Int8Activations &group : quantized[kind].groups) any_amx = any_amx || group.tile_rows;
  }
  // Not `quantized` itself, of which the threads of the loop below have their own.
  const Int8Activations *group_activations[] = {quantized[0].groups.data(), quantized[1].groups.data()};
  const int64_t range_size = !any_int8                                            ? FLOAT_OUTPUTS
                             : max_rows <= Int8Activations::ROW_GROUP && !any_amx ? FEW_ROWS_OUTPUTS
                                                                                  : MANY_ROWS_OUTPUTS;
  for_output_ranges(range_size, matrices, n_groups * per_group, threads, [&](const Matrix &m, int64_t index, int64_t from, int64_t to) {
    const int64_t g = index / per_group;
    if (m.int8_layout) return int8_outputs(group_activations[act_scale_kind(m)][g], m, from, to);
    float_outputs(x + offsets[g] * n_in, offsets[g + 1] - offsets[g], n_in, m, from, to);
  });
}

}  // namespace

void gated_mlp(const float *x, int64_t rows, int64_t n_in, const Matrix &gate, const Matrix &up, bool use_gelu,
               const Matrix &down, bool prefill, int threads) {
  static thread_local Scratch x_scratch, hidden_scratch, hidden_floats;
  if (HAVE_AMX && prefill && gate.int8_layout && up.int8_layout && down.int8_layout && gate.format == up.format) {
    const Bf16Activations bf16 = bf16_activations(rows, n_in, x_scratch), hidden = bf16_activations(rows, gate.n_out, hidden_scratch);
    quantize_rows(x, bf16, threads);
    for_output_ranges(PREFILL_OUTPUTS, &gate, 1, threads, [&](const Matrix &, int64_t, int64_t from, int64_t to) {
      bf16_outputs(bf16, gate, up, use_gelu, from, to, hidden);
    });
    return multiply_prefill(nullptr, hidden, &down, 1, threads);
  }
  const int64_t up_offset = Scratch::round_up_to_line(rows * gate.n_out);
  float *gate_y = hidden_floats.get(2 * up_offset), *up_y = gate_y + up_offset;
  const Matrix gate_up[] = {with_output(gate, gate_y, false), with_output(up, up_y, false)};
  check(longdraft_linear(x, rows, n_in, gate_up, 2, prefill, threads));
  gate_and_mul(gate_y, up_y, rows, gate.n_out, threads, use_gelu);
  check(longdraft_linear(gate_y, rows, gate.n_out, &down, 1, prefill, threads));
}

Status longdraft_linear(const float *x, int64_t rows, int64_t n_in, const Matrix *matrices, int64_t count, int64_t prefill,
                      int threads) try {
  if (HAVE_AMX && prefill && std::any_of(matrices, matrices + count, [](const Matrix &m) { return m.int8_layout; })) {
    static thread_local Scratch scratch;
    const Bf16Activations bf16 = bf16_activations(rows, n_in, scratch);
    quantize_rows(x, bf16, threads);
    multiply_prefill(x, bf16, matrices, count, threads);
    return OK;
  }
  const int64_t offsets[] = {0, rows};
  multiply_groups(x, n_in, matrices, count, offsets, 1, threads);
  return OK;
} CATCH_EXCEPTIONS

Status longdraft_grouped_gemm(const float *x, int64_t n_in, const Matrix *matrices, int64_t per_expert, const int64_t *expert_ids,
                              const int64_t *offsets, int64_t n_groups, float *y, int threads) try {
  std::vector<Matrix> expert_matrices;
  for (int64_t g = 0; g < n_groups; g++) {
    float *out = y;
    for (int64_t i = 0; i < per_expert; i++) {
      Matrix m = matrices[expert_ids[g] * per_expert + i];
      m.y = out + offsets[g] * m.n_out;
      out += offsets[n_groups] * m.n_out;
      expert_matrices.push_back(m);
    }
  }
  multiply_groups(x, n_in, expert_matrices.data(), per_expert, offsets, n_groups, threads);
  return OK;
} CATCH_EXCEPTIONS

int longdraft_lanes() { return LANES; }

void longdraft_set_parallel_entry(Parallel entry) { parallel_entry = entry; }
