// The KV cache in float32, in bfloat16 (the default of int8 arithmetic), or in int8 with a scale for each entry of a head.
// 16- and 8-bit entries are converted in registers, sums are float32. K is stored transposed unless it is float32.
#pragma once

#include "kernels.h"
#include "packed_rows.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace {

using std::int64_t;

// Calls f with p as a pointer to elements of the dtype.
template <typename Fn>
inline void dispatch_dtype(void *p, KVDtype dtype, const Fn &f) {
  if (dtype == KVDtype::BFLOAT16) return f(static_cast<BFloat16 *>(p));
  if (dtype == KVDtype::INT8) return f(static_cast<std::int8_t *>(p));
  f(static_cast<float *>(p));
}

// The cache of layer i.
inline KVCache kv_layer(KVCache kv, int64_t i) {
  dispatch_dtype(kv.k, kv.dtype, [&](auto *k) { kv.k = k + i * kv.k_layer; });
  dispatch_dtype(kv.v, kv.dtype, [&](auto *v) { kv.v = v + i * kv.v_layer; });
  if (kv.k_scale) {
    kv.k_scale += i * kv.scale_layer;
    kv.v_scale += i * kv.scale_layer;
  }
  return kv;
}

// The cache of one KV head of a slot.
struct KVHead {
  void *k, *v;
  int64_t k_row, k_dim, v_row;
  KVDtype dtype;
  float *k_scale, *v_scale;  // null except for INT8
};

inline KVHead kv_head(const KVCache &kv, int64_t slot, int64_t head) {
  KVHead out{kv.k, kv.v, kv.k_row, kv.k_dim, kv.v_row, kv.dtype, kv.k_scale, kv.v_scale};
  dispatch_dtype(kv.k, kv.dtype, [&](auto *k) { out.k = k + slot * kv.k_slot + head * kv.k_head; });
  dispatch_dtype(kv.v, kv.dtype, [&](auto *v) { out.v = v + slot * kv.v_slot + head * kv.v_head; });
  for (float **scale : {&out.k_scale, &out.v_scale}) {
    if (*scale) *scale += slot * kv.scale_slot + head * kv.scale_head;
  }
  return out;
}

// Writes x (d,) as elements that are `step` apart, rounded to their type. scale: an int8 entry's scale is written there.
inline void quantize(const float *x, int64_t d, float *to, int64_t step, float *) {
  for (int64_t i = 0; i < d; i++) to[i * step] = x[i];
}

inline void quantize(const float *x, int64_t d, BFloat16 *to, int64_t step, float *) {
  for (int64_t i = 0; i < d; i++) {
    std::uint32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    // Rounds to nearest, ties to even; NaN stays NaN (0x7fc0).
    to[i * step].bits = static_cast<std::uint16_t>(x[i] == x[i] ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0);
  }
}

// If x is not finite, the scale is not finite.
inline void quantize(const float *x, int64_t d, std::int8_t *to, int64_t step, float *scale) {
  float max = 0, sum = 0;
  for (int64_t i = 0; i < d; i++) {
    max = std::max(max, std::abs(x[i]));
    sum += x[i] * 0;  // NaN if x is not finite, else 0
  }
  *scale = max / 127 + sum;
  const float divisor = std::max(*scale, std::numeric_limits<float>::min());
  for (int64_t i = 0; i < d; i++) {
    // Adding 1.5 * 2^23 rounds to an integer, ties to even, which is then in the mantissa's lowest bits.
    const float shifted = x[i] / divisor + 12582912.0f;
    std::int32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    to[i * step] = static_cast<std::int8_t>(bits);
  }
}

// Writes the key and value (d,) of a head as entry `row` of a slot.
inline void write_kv(const KVCache &kv, int64_t slot, int64_t head, int64_t row, const float *key, const float *value,
                     int64_t d) {
  const KVHead cache = kv_head(kv, slot, head);
  dispatch_dtype(cache.k, cache.dtype, [&](auto *k) { quantize(key, d, k + row * cache.k_row, cache.k_dim, cache.k_scale + row); });
  dispatch_dtype(cache.v, cache.dtype, [&](auto *v) { quantize(value, d, v + row * cache.v_row, 1, cache.v_scale + row); });
}

}  // namespace
