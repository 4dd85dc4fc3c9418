// Computes y = x w^T + bias for a prompt's rows, in bfloat16 on AMX. Activations and dequantized weights are rounded to bfloat16.
//
// A group of 32 outputs times a group of 32 rows has four tiles of sums. Weights are dequantized INPUT_BLOCK inputs at a time, and used for
// many rows while they are in the L1 cache. An MLP's hidden activations stay in bfloat16, because float32 would double memory traffic.
#include "amx_bf16.h"
#include "outputs.h"
#include "ops.h"
#include "matmul.h"

#if defined(LONGDRAFT_AMX)
namespace {

using bf16::TILE_DEPTH;
using bf16::TILE_SIDE;

constexpr int64_t ROW_GROUP = Bf16Activations::ROW_GROUP, OUTPUT_GROUP = 2 * LANES;  // both 32
constexpr int64_t INPUT_BLOCK = 8 * TILE_DEPTH;  // inputs whose weights are dequantized at a time
constexpr int64_t ROW_BLOCK = 512;               // rows that are computed at a time: activations and sums stay in the L2 cache
constexpr int64_t GROUP_SUMS = ROW_GROUP * OUTPUT_GROUP, TILE_SUMS = TILE_SIDE * TILE_SIDE;

// Rounds to bfloat16, ties away from zero: a into the lower half of each lane, b into the upper half.
ALWAYS_INLINE inline ivec to_bf16_pair(vec a, vec b) {
  const auto bits = [](vec x) ALWAYS_INLINE { return (__m512i)((ivec)x + 0x8000); };
  return (ivec)_mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(bits(a), 16), bits(b));
}

// Dequantizes n_in weights of LANES outputs to AMX's right operands, tiles (TILE_DEPTH / 2, TILE_SIDE) of bfloat16 pairs. Writes every other
// tile of `out`, because the two vectors of a group of outputs alternate there. next: address of weights to prefetch.
template <typename F> void dequantize_block(InterleavedRows in, int64_t n_in, Address next, ivec *out) {
  constexpr int64_t SUB_BLOCK_BYTES = F::BYTES * LANES * SUB_BLOCK / F::WEIGHTS;
  Address prefetch_end = next;
  for (int64_t i = 0; i < n_in; i += F::WEIGHTS, in = in.advance(F::BYTES), out += F::WEIGHTS) {
    F::unpack_block(in, [&](int sub_block, const auto &w, const auto *scale, const vec *min) ALWAYS_INLINE {
      for (prefetch_end += SUB_BLOCK_BYTES; next < prefetch_end; next += 64) prefetch<2>(next);
      UNROLL for (int s = 0; s < F::SCALES_PER_SUB_BLOCK; s++) {
        // Puts a code into the mantissa of 256.0f (0x43800000), which gives 256 + code and saves the conversion. The offset subtracts 256.
        const vec d = scale[s], offset = (F::HAS_MIN ? min[s] : vec{}) - d * (256.0f + F::ZERO_POINT);
        const auto code_to_float = [=](ivec shifted) ALWAYS_INLINE { return fmadd((vec)((shifted & 0x7f8000) | 0x43800000), d, offset); };
        constexpr int COLUMNS = COLUMNS_PER_SUB_BLOCK / F::SCALES_PER_SUB_BLOCK;
        UNROLL for (int c = s * COLUMNS; c < (s + 1) * COLUMNS; c++) {
          const ivec codes = apply_codebook<F>(w(c));
          out[2 * sub_block * TILE_SIDE + 2 * c] = to_bf16_pair(code_to_float(codes << 15), code_to_float(codes << 7));
          out[2 * sub_block * TILE_SIDE + 2 * c + 1] = to_bf16_pair(code_to_float(codes >> 1), code_to_float(codes >> 9));
        }
      }
    });
  }
}

// Multiplies a group of rows with a group of outputs over n_tiles tiles of inputs: sums = x times w, or += if `accumulate`. sums are four
// tiles: (rows 0 to 15, outputs 0 to 15), (rows 0 to 15, outputs 16 to 31), and the two of rows 16 to 31.
void multiply(const BFloat16 *x, const ivec *w, int64_t n_tiles, float *sums, bool accumulate) {
  if (accumulate) {
    static_for<4>([=](auto tile) ALWAYS_INLINE { amx::load<tile.value>(sums + tile.value * TILE_SUMS); });
  } else {
    amx::zero<0, 4>();
  }
  for (int64_t k = 0; k < n_tiles; k++, x += ROW_GROUP * TILE_DEPTH, w += 2 * TILE_SIDE) {
    amx::load<4>(x);
    amx::load<6>(w);
    amx::dot_bf16<0, 4, 6>();
    amx::load<7>(w + TILE_SIDE);
    amx::dot_bf16<1, 4, 7>();
    amx::load<5>(x + TILE_SIDE * TILE_DEPTH);
    amx::dot_bf16<2, 5, 6>();
    amx::dot_bf16<3, 5, 7>();
  }
  static_for<4>([=](auto tile) ALWAYS_INLINE { amx::store<tile.value>(sums + tile.value * TILE_SUMS); });
}

// Returns the address of a row's sums of outputs 0 to 15. Those of outputs 16 to 31 are TILE_SUMS floats behind.
const float *sums_of_row(const float *sums, int64_t row) { return sums + row / TILE_SIDE * 2 * TILE_SUMS + row % TILE_SIDE * TILE_SIDE; }

// Writes finished sums as float32 outputs of a matrix: of a group of outputs, from `out` on, and a group of `rows` rows, from `row` on.
struct FloatOutput {
  const Matrix *matrices[1];

  void prefetch_output(int64_t out, int64_t row, int64_t rows) const {
    const Matrix &m = *matrices[0];
    for (int64_t r = row; r < row + rows; r++) {
      for (int64_t o = out; o < std::min(m.n_out, out + OUTPUT_GROUP); o += LANES) __builtin_prefetch(m.y + r * m.n_out + o, 1);
    }
  }

  void write(int64_t out, int64_t row, int64_t rows, const float *sums, int64_t) const {
    const Matrix &m = *matrices[0];
    for (int64_t b = 0; b < 2 && out + b * LANES < m.n_out; b++) {
      const OutputVector vector(m, out + b * LANES);
      for (int64_t i = 0; i < rows; i++) vector.write(m, row + i, load(sums_of_row(sums, i) + b * TILE_SUMS));
    }
  }
};

// Writes silu(gate) * up, or gelu(gate) * up, as the bfloat16 activations y of an MLP's down projection. gate_to_up: the distance in floats
// from gate's sums to up's.
struct GatedOutput {
  const Matrix *matrices[2];
  const bool use_gelu;
  const Bf16Activations &y;

  void prefetch_output(int64_t, int64_t, int64_t) const {}

  void write(int64_t out, int64_t row, int64_t, const float *sums, int64_t gate_to_up) const {
    const auto sum_of = [=](int matrix, int64_t i, int b) ALWAYS_INLINE {
      const vec sum = load(sums_of_row(sums + matrix * gate_to_up, i) + b * TILE_SUMS);
      const float *bias = matrices[matrix]->bias;
      return bias ? sum + load(bias + out + b * LANES) : sum;
    };
    const auto gated_value = [=](int64_t i, int b) ALWAYS_INLINE {
      const vec x = sum_of(0, i, b);
      return (use_gelu ? gelu(x) : silu(x)) * sum_of(1, i, b);
    };
    BFloat16 *values = y.values + row * y.n_in + out * ROW_GROUP;
    for (int64_t i = 0; i < ROW_GROUP; i++, values += TILE_DEPTH) {
      const ivec pair = bf16::round_to_bf16(gated_value(i, 0), gated_value(i, 1));
      std::memcpy(values, &pair, sizeof pair);
    }
  }
};

// Computes outputs [from, to) of output.matrices for all rows: of one matrix, or of gate and up, whose groups of outputs alternate.
template <typename F, typename Output> void matmul_outputs(const Bf16Activations &x, int64_t from, int64_t to, const Output &output) {
  constexpr int64_t N_MATRICES = std::extent_v<decltype(output.matrices)>;
  static thread_local Scratch sums_scratch, weights_scratch, interleave_scratch;
  ivec *w = reinterpret_cast<ivec *>(weights_scratch.get(ROW_GROUP * INPUT_BLOCK / 2));
  const amx::TileConfig config;
  const int64_t n_groups = N_MATRICES * ((to - from + OUTPUT_GROUP - 1) / OUTPUT_GROUP);
  for (int64_t row = 0; row < x.rows; row += ROW_BLOCK) {
    const int64_t end = std::min(x.rows, row + ROW_BLOCK), row_groups = (end - row + ROW_GROUP - 1) / ROW_GROUP;
    const int64_t gate_to_up = row_groups * GROUP_SUMS;
    float *sums = sums_scratch.get(n_groups * gate_to_up);
    for (int64_t first = 0; first < x.n_in; first += INPUT_BLOCK) {
      const int64_t depth = std::min(INPUT_BLOCK, x.n_in - first);
      const bool last_inputs = first + depth == x.n_in;
      for (int64_t g = 0; g < n_groups; g++) {
        const Matrix &m = *output.matrices[g % N_MATRICES];
        const int64_t out = from + g / N_MATRICES * OUTPUT_GROUP;
        const bool sums_finished = last_inputs && g % N_MATRICES == N_MATRICES - 1;
        for (int b = 0; b < 2; b++) {
          const OutputVector vector(m, out + b * LANES);
          const Address next = address_of(vector.weights(m)) + OUTPUT_GROUP * m.w_stride + LANES * (first / F::WEIGHTS * F::BYTES);
          dequantize_block<F>(vector.interleaved_weights<F>(m, first, depth, interleave_scratch), depth, next, w + b * TILE_SIDE);
        }
        const BFloat16 *values = x.values + row * x.n_in + first * ROW_GROUP;
        float *group_sums = sums + g * gate_to_up;
        for (int64_t r = row; r < end; r += ROW_GROUP, values += ROW_GROUP * x.n_in, group_sums += GROUP_SUMS) {
          if (sums_finished) output.prefetch_output(out, r, std::min(ROW_GROUP, end - r));
          multiply(values, w, depth / TILE_DEPTH, group_sums, first > 0);
          if (sums_finished) output.write(out, r, std::min(ROW_GROUP, end - r), group_sums - (N_MATRICES - 1) * gate_to_up, gate_to_up);
        }
      }
    }
  }
}

}  // namespace

void quantize_rows(const float *x, const Bf16Activations &y, int threads) {
  parallel_for(threads, y.padded_rows() / ROW_GROUP, [=](int64_t group) {
    for (int64_t r = group * ROW_GROUP; r < (group + 1) * ROW_GROUP; r++) {
      BFloat16 *values = y.values + group * ROW_GROUP * y.n_in + r % ROW_GROUP * TILE_DEPTH;
      for (int64_t i = 0; i < y.n_in; i += TILE_DEPTH, values += ROW_GROUP * TILE_DEPTH) {
        const float *from = x + r * y.n_in + i;
        const ivec pair = r < y.rows ? bf16::round_to_bf16(load(from), load(from + TILE_SIDE)) : ivec{};
        std::memcpy(values, &pair, sizeof pair);
      }
    }
  });
}

void bf16_outputs(const Bf16Activations &x, const Matrix &m, int64_t from, int64_t to) {
  dispatch_format(m.format, [&](auto f) { matmul_outputs<decltype(f)>(x, from, to, FloatOutput{{&m}}); });
}

void bf16_outputs(const Bf16Activations &x, const Matrix &gate, const Matrix &up, bool use_gelu, int64_t from, int64_t to,
                  const Bf16Activations &y) {
  dispatch_format(gate.format, [&](auto f) { matmul_outputs<decltype(f)>(x, from, to, GatedOutput{{&gate, &up}, use_gelu, y}); });
}
#else
void quantize_rows(const float *, const Bf16Activations &, int) {}
void bf16_outputs(const Bf16Activations &, const Matrix &, std::int64_t, std::int64_t) {}
void bf16_outputs(const Bf16Activations &, const Matrix &, const Matrix &, bool, std::int64_t, std::int64_t, const Bf16Activations &) {}
#endif
