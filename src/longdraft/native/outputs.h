// LANES outputs of a quantized matrix: the location of their weights, and how their sums are written.
#pragma once

#include "quants.h"

#include <algorithm>

namespace {

// Looks codes up in the format's codebook, if it has one.
template <typename F>
ALWAYS_INLINE inline ivec apply_codebook(ivec w) {
  if constexpr (F::HAS_CODEBOOK) return lookup16(F::CODEBOOK, w);
  return w;
}

// LANES outputs, from `out` on. At the end of the matrix they overlap with the previous vector, which has computed the first `skip`.
struct OutputVector {
  int64_t out, skip;

  OutputVector(const Matrix &m, int64_t first_out)
      : out(std::max<int64_t>(0, std::min(first_out, m.n_out - LANES))), skip(first_out - out) {}

  const byte *first(const Matrix &m) const { return static_cast<const byte *>(m.w) + out * m.w_stride; }

  // Weights [first_in, first_in + n_in) of these outputs; interleaves them if m is not. Without enough outputs, the other lanes are 0.
  template <typename F>
  InterleavedRows interleaved(const Matrix &m, int64_t first_in, int64_t n_in, Scratch &scratch) const {
    const int64_t offset = first_in / F::WEIGHTS * F::BYTES, blocks = n_in / F::WEIGHTS, bytes = blocks * F::BYTES;
    if (m.int8_layout == LANES) return {first(m) + LANES * offset};
    byte *result = reinterpret_cast<byte *>(scratch.get((2 * LANES * bytes + 3) / 4)), *padded = result + LANES * bytes;
    const byte *rows = first(m) + offset;
    if (m.n_out >= LANES) return repack<F>(rows, m.w_stride, blocks, result), InterleavedRows{result};
    std::memset(padded, 0, LANES * bytes);
    for (int64_t o = 0; o < m.n_out; o++) std::memcpy(padded + o * bytes, rows + o * m.w_stride, bytes);
    return repack<F>(padded, bytes, blocks, result), InterleavedRows{result};
  }

  void write(const Matrix &m, int64_t row, vec y_vector) const {
    float values[LANES];
    const int64_t count = std::min<int64_t>(LANES, m.n_out);
    if (skip == 0 && count == LANES) {
      float *y = m.y + row * m.n_out + out;
      if (m.bias) y_vector += load(m.bias + out);
      return store(y, m.accumulate ? load(y) + y_vector : y_vector);
    }
    store(values, y_vector);
    for (int64_t l = skip; l < count; l++) {
      float *y = m.y + row * m.n_out + out + l;
      const float value = m.bias ? values[l] + m.bias[out + l] : values[l];
      *y = m.accumulate ? *y + value : value;
    }
  }
};

}  // namespace
