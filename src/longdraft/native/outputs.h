// Finds the weights of LANES outputs of a quantized matrix, and writes their sums.
#pragma once

#include "quants.h"
#include <algorithm>

namespace {

// Returns the codes of w: looks them up if the format has a codebook.
template <typename F> ALWAYS_INLINE inline ivec apply_codebook(ivec w) {
  if constexpr (F::HAS_CODEBOOK) return lookup16(F::CODEBOOK, w);
  return w;
}

// LANES outputs from `out` on. At the end of the matrix they overlap with the vector before, which has written the first `skip` of them.
struct OutputVector {
  int64_t out, skip;

  OutputVector(const Matrix &m, int64_t first_out)
      : out(std::max<int64_t>(0, std::min(first_out, m.n_out - LANES))), skip(first_out - out) {}

  // Returns the address of the first output's weights.
  const byte *weights(const Matrix &m) const { return static_cast<const byte *>(m.w) + out * m.w_stride; }

  // Returns weights [first_in, first_in + n_in) of these outputs as interleaved rows. Interleaves them into scratch unless m already is.
  // Lanes without an output are 0.
  template <typename F> InterleavedRows interleaved_weights(const Matrix &m, int64_t first_in, int64_t n_in, Scratch &scratch) const {
    const int64_t offset = first_in / F::WEIGHTS * F::BYTES, n_blocks = n_in / F::WEIGHTS, bytes = n_blocks * F::BYTES;
    if (m.int8_layout == LANES) return {weights(m) + LANES * offset};
    byte *result = reinterpret_cast<byte *>(scratch.get((2 * LANES * bytes + 3) / 4)), *padded = result + LANES * bytes;
    const byte *rows = weights(m) + offset;
    if (m.n_out >= LANES) return repack<F>(rows, m.w_stride, n_blocks, result), InterleavedRows{result};
    std::memset(padded, 0, LANES * bytes);
    for (int64_t o = 0; o < m.n_out; o++) std::memcpy(padded + o * bytes, rows + o * m.w_stride, bytes);
    return repack<F>(padded, bytes, n_blocks, result), InterleavedRows{result};
  }

  // Writes these outputs of a row: m.y = or += sums + bias.
  void write(const Matrix &m, int64_t row, vec sums) const {
    float values[LANES];
    const int64_t count = std::min<int64_t>(LANES, m.n_out);
    if (skip == 0 && count == LANES) {
      float *y = m.y + row * m.n_out + out;
      if (m.bias) sums += load(m.bias + out);
      return store(y, m.accumulate ? load(y) + sums : sums);
    }
    store(values, sums);
    for (int64_t l = skip; l < count; l++) {
      float *y = m.y + row * m.n_out + out + l;
      const float value = m.bias ? values[l] + m.bias[out + l] : values[l];
      *y = m.accumulate ? *y + value : value;
    }
  }
};

}  // namespace
