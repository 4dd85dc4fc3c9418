// A vector's worth of a stored matrix's outputs: where their weights lie, and where their products go.
#pragma once

#include "formats.h"

#include <algorithm>

namespace {

// What four weights of each output stand for.
template <typename F>
INLINED inline ivec listed(ivec w) {
  if constexpr (F::LISTED) return looked_up(F::LIST, w);
  return w;
}

// LANES outputs of a matrix. At the end of the matrix they overlap with the previous ones: outputs before `skip` are done.
struct Outputs {
  int64_t out, skip;

  Outputs(const Matrix &m, int64_t out_) : out(std::max<int64_t>(0, std::min(out_, m.outs - LANES))), skip(out_ - out) {}

  const byte *first(const Matrix &m) const { return static_cast<const byte *>(m.w) + out * m.w_row; }

  // `size` weights of W's rows, from `begin` on, woven here if they are not. Of fewer rows than lanes, the rest is zeros.
  template <typename F>
  Woven woven(const Matrix &m, int64_t begin, int64_t size, Scratch &scratch) const {
    const int64_t skipped = begin / F::WEIGHTS * F::BYTES, blocks = size / F::WEIGHTS, bytes = blocks * F::BYTES;
    if (m.int8 == LANES) return {first(m) + LANES * skipped};
    byte *made = reinterpret_cast<byte *>(scratch.of((2 * LANES * bytes + 3) / 4)), *copy = made + LANES * bytes;
    const byte *rows = first(m) + skipped;
    if (m.outs >= LANES) return weave<F>(rows, m.w_row, blocks, made), Woven{made};
    std::memset(copy, 0, LANES * bytes);
    for (int64_t o = 0; o < m.outs; o++) std::memcpy(copy + o * bytes, rows + o * m.w_row, bytes);
    return weave<F>(copy, bytes, blocks, made), Woven{made};
  }

  void finish(const Matrix &m, int64_t row, vec found) const {
    float values[LANES];
    const int64_t here = std::min<int64_t>(LANES, m.outs);
    if (skip == 0 && here == LANES) {
      float *y = m.y + row * m.outs + out;
      if (m.bias) found += load(m.bias + out);
      return store(y, m.adds ? load(y) + found : found);
    }
    store(values, found);
    for (int64_t l = skip; l < here; l++) {
      float *y = m.y + row * m.outs + out + l;
      const float value = m.bias ? values[l] + m.bias[out + l] : values[l];
      *y = m.adds ? *y + value : value;
    }
  }
};

}  // namespace
