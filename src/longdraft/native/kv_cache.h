// Addresses and writes the KV cache: in float32, in bfloat16 (the default with int8 arithmetic), in int8 with a scale for each entry of a
// head, or in int4 (int4_kv.h). Entries of 16 and 8 bits are converted in registers, those of 4 bits block by block; sums are float32. K is
// stored transposed unless it is float32.
#pragma once

#include "int4_kv.h"
#include <algorithm>
#include <cmath>
#include <limits>

namespace {

using std::int64_t;

// Calls f(p) with p as a pointer to elements of the dtype, which is not INT4.
template <typename Fn> inline void dispatch_dtype(void *p, KVDtype dtype, const Fn &f) {
  if (dtype == KVDtype::BFLOAT16) return f(static_cast<BFloat16 *>(p));
  if (dtype == KVDtype::INT8) return f(static_cast<std::int8_t *>(p));
  f(static_cast<float *>(p));
}

// Returns the address of element number i.
inline void *kv_element(void *p, KVDtype dtype, int64_t i) {
  return static_cast<byte *>(p) + i * (dtype == KVDtype::FLOAT32 ? 4 : dtype == KVDtype::BFLOAT16 ? 2 : 1);
}

// Returns the part of a cache that belongs to its layer i.
inline KVCache kv_layer(KVCache kv, int64_t i) {
  kv.k = kv_element(kv.k, kv.dtype, i * kv.k_layer_stride);
  kv.v = kv_element(kv.v, kv.dtype, i * kv.v_layer_stride);
  if (kv.k_scale) {
    kv.k_scale += i * kv.scale_layer_stride;
    kv.v_scale += i * kv.scale_layer_stride;
  }
  return kv;
}

// The part of a cache that belongs to one KV head of a slot; strides are as in KVCache.
struct KVHead {
  void *k, *v;
  int64_t k_row_stride, k_dim_stride, v_row_stride;
  KVDtype dtype;
  float *k_scale, *v_scale;  // null except for INT8
};

inline KVHead kv_head(const KVCache &kv, int64_t slot, int64_t head) {
  KVHead out{kv_element(kv.k, kv.dtype, slot * kv.k_slot_stride + head * kv.k_head_stride),
             kv_element(kv.v, kv.dtype, slot * kv.v_slot_stride + head * kv.v_head_stride),
             kv.k_row_stride, kv.k_dim_stride, kv.v_row_stride, kv.dtype, kv.k_scale, kv.v_scale};
  for (float **scale : {&out.k_scale, &out.v_scale}) {
    if (*scale) *scale += slot * kv.scale_slot_stride + head * kv.scale_head_stride;
  }
  return out;
}

// Each quantize() converts x (d,) to the type of `to` and writes element i to to[i * stride]. With int8, it writes the entry's scale too.
inline void quantize(const float *x, int64_t d, float *to, int64_t stride, float *) {
  for (int64_t i = 0; i < d; i++) to[i * stride] = x[i];
}

inline void quantize(const float *x, int64_t d, BFloat16 *to, int64_t stride, float *) {
  for (int64_t i = 0; i < d; i++) {
    std::uint32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    // Rounds to nearest, ties to even; NaN stays NaN (0x7fc0).
    to[i * stride].bits = static_cast<std::uint16_t>(x[i] == x[i] ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0);
  }
}

// If a number of x is not finite, the scale is not finite either.
inline void quantize(const float *x, int64_t d, std::int8_t *to, int64_t stride, float *scale) {
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
    to[i * stride] = static_cast<std::int8_t>(bits);
  }
}

// Writes a key (d,) as entry number `entry`.
inline void write_key(const KVHead &kv, int64_t entry, const float *key, int64_t d) {
  void *to = kv_element(kv.k, kv.dtype, entry * kv.k_row_stride);
  if (kv.dtype == KVDtype::INT4) return quantize_int4(key, Int4Layout(d, true), static_cast<byte *>(to), kv.k_dim_stride);
  dispatch_dtype(to, kv.dtype, [&](auto *k) { quantize(key, d, k, kv.k_dim_stride, kv.k_scale + entry); });
}

// Writes a value (d,) as entry number `entry`.
inline void write_value(const KVHead &kv, int64_t entry, const float *value, int64_t d) {
  void *to = kv_element(kv.v, kv.dtype, entry * kv.v_row_stride);
  if (kv.dtype == KVDtype::INT4) return quantize_int4(value, Int4Layout(d, false), static_cast<byte *>(to), 1);
  dispatch_dtype(to, kv.dtype, [&](auto *v) { quantize(value, d, v, 1, kv.v_scale + entry); });
}

// Writes the key and value (d,) of a head as entry number `entry` of a slot.
inline void write_kv(const KVCache &kv, int64_t slot, int64_t head, int64_t entry, const float *key, const float *value, int64_t d) {
  const KVHead cache = kv_head(kv, slot, head);
  write_key(cache, entry, key, d);
  write_value(cache, entry, value, d);
}

}  // namespace
