// Keys and values in fewer bytes: bfloat16, which int8 arithmetic uses, or eight bits and a scale for each row. They are unpacked in
// registers, and all sums are of floats. Keys are stored column-wise.
#pragma once

#include "kernels.h"
#include "stored.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace {

using std::int64_t;

// what(p), p a pointer to numbers as they lie.
template <typename What>
inline void as_stored(void *p, Kept format, const What &what) {
  if (format == Kept::BFLOAT16) return what(static_cast<Brief *>(p));
  if (format == Kept::INT8) return what(static_cast<std::int8_t *>(p));
  what(static_cast<float *>(p));
}

// Those of one layer.
inline KeysValues of_layer(KeysValues kv, int64_t i) {
  as_stored(kv.k, kv.format, [&](auto *k) { kv.k = k + i * kv.k_layer; });
  as_stored(kv.v, kv.format, [&](auto *v) { kv.v = v + i * kv.v_layer; });
  if (kv.k_scale) {
    kv.k_scale += i * kv.scale_layer;
    kv.v_scale += i * kv.scale_layer;
  }
  return kv;
}

// A head's keys and values.
struct Text {
  void *k, *v;
  int64_t k_row, k_dim, v_row;
  Kept format;
  float *k_scale, *v_scale;  // null except for INT8
};

inline Text text_of(const KeysValues &kv, int64_t slot, int64_t head) {
  Text text{kv.k, kv.v, kv.k_row, kv.k_dim, kv.v_row, kv.format, kv.k_scale, kv.v_scale};
  as_stored(kv.k, kv.format, [&](auto *k) { text.k = k + slot * kv.k_slot + head * kv.k_head; });
  as_stored(kv.v, kv.format, [&](auto *v) { text.v = v + slot * kv.v_slot + head * kv.v_head; });
  for (float **scale : {&text.k_scale, &text.v_scale}) {
    if (*scale) *scale += slot * kv.scale_slot + head * kv.scale_head;
  }
  return text;
}

// Writes x (d,), its numbers `step` apart; scale: of an int8 row.
inline void pack(const float *x, int64_t d, float *to, int64_t step, float *) {
  for (int64_t i = 0; i < d; i++) to[i * step] = x[i];
}

inline void pack(const float *x, int64_t d, Brief *to, int64_t step, float *) {
  for (int64_t i = 0; i < d; i++) {
    std::uint32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    // Rounds to the nearest, ties to even; NaN stays NaN.
    to[i * step].bits = static_cast<std::uint16_t>(x[i] == x[i] ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0);
  }
}

// A row that is not finite gets a scale that is not finite.
inline void pack(const float *x, int64_t d, std::int8_t *to, int64_t step, float *scale) {
  float largest = 0, sum = 0;
  for (int64_t i = 0; i < d; i++) {
    largest = std::max(largest, std::abs(x[i]));
    sum += x[i] * 0;  // NaN, or 0
  }
  *scale = largest / 127 + sum;
  const float by = std::max(*scale, std::numeric_limits<float>::min());
  for (int64_t i = 0; i < d; i++) {
    // Adding 1.5 * 2^23 rounds to a whole number, ties to even, kept in the lowest bits.
    const float shifted = x[i] / by + 12582912.0f;
    std::int32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    to[i * step] = static_cast<std::int8_t>(bits);
  }
}

// Writes a head's key and value (d,) as a row of a slot.
inline void write_row(const KeysValues &kv, int64_t slot, int64_t head, int64_t row, const float *key, const float *value,
                      int64_t d) {
  const Text t = text_of(kv, slot, head);
  as_stored(t.k, t.format, [&](auto *k) { pack(key, d, k + row * t.k_row, t.k_dim, t.k_scale + row); });
  as_stored(t.v, t.format, [&](auto *v) { pack(value, d, v + row * t.v_row, 1, t.v_scale + row); });
}

}  // namespace
