// KV entries in about four bits. Numbers i and i + d / 2 of a key are a pair, which RoPE rotates. Keys of some models (Qwen2.5) have a few
// large numbers, in the pairs that rotate slowest, so the last INT4_SLOW_PAIRS pairs of a key are in eight bits. All other numbers, of values
// too, are in four bits; the scale of INT4_GROUP_PAIRS pairs is their number of the largest magnitude / -8, as in ggml's Q4_0.
//
// The bytes of an entry: one for each pair in four bits (the first number in the lower half, from 0 to 15 for -8 to 7); the first and then
// the second numbers of slow pairs, int8; then scales: the two upper bytes of a float for each group, and the three upper bytes of one for
// the slow pairs, whose largest number keeps its precision. Scales are cut, not rounded, so that a group's largest number keeps its code
// when it is quantized again.
#pragma once

#include "kernels.h"
#include "packed_rows.h"
#include <algorithm>
#include <cmath>
#include <limits>

namespace {

using std::int64_t;

constexpr int GROUP_SCALE_BYTES = 2, SLOW_SCALE_BYTES = 3;

struct Int4Layout {
  int64_t half, n_packed, n_slow;  // pairs: all, in four bits, in eight bits

  Int4Layout(int64_t d, bool is_key)
      : half(d / 2), n_packed(half - (is_key ? std::min<int64_t>(INT4_SLOW_PAIRS, d / 4) : 0)), n_slow(half - n_packed) {}

  // Calls f(first pair, end, byte of the scale) for each group of pairs in four bits.
  template <typename Fn> void for_each_group(const Fn &f) const {
    for (int64_t first = 0, scale = n_packed + 2 * n_slow; first < n_packed;
         first += INT4_GROUP_PAIRS, scale += GROUP_SCALE_BYTES) {
      f(first, std::min<int64_t>(first + INT4_GROUP_PAIRS, n_packed), scale);
    }
  }

  int64_t slow_scale() const {
    return n_packed + 2 * n_slow + GROUP_SCALE_BYTES * ((n_packed + INT4_GROUP_PAIRS - 1) / INT4_GROUP_PAIRS);
  }
};

// Writes the BYTES upper bytes of a scale, and returns what to divide by. A group whose scale is 0 becomes zeros.
template <int BYTES> inline float write_int4_scale(float scale, byte *to, int64_t stride) {
  std::uint32_t bits;
  std::memcpy(&bits, &scale, sizeof bits);
  bits &= ~0u << (32 - 8 * BYTES);
  for (int b = 0; b < BYTES; b++) to[b * stride] = static_cast<byte>(bits >> (32 - 8 * (BYTES - b)));
  std::memcpy(&scale, &bits, sizeof scale);
  return std::abs(scale) < std::numeric_limits<float>::min() ? 1.0f : scale;
}

template <int BYTES> inline float int4_scale(const byte *from, int64_t stride) {
  std::uint32_t bits = 0;
  for (int b = 0; b < BYTES; b++) bits |= static_cast<std::uint32_t>(from[b * stride]) << (32 - 8 * (BYTES - b));
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return scale;
}

// Returns x rounded to an integer, ties to even, within [min, max]. NaN becomes 0, as its scale is NaN.
inline int int4_code(float x, float min, float max) {
  return x == x ? static_cast<int>(std::min(std::max(x, min), max) + 12582912.0f - 12582912.0f) : 0;  // 1.5 * 2^23 rounds
}

// Quantizes x (d,), and writes byte i of the entry to to[i * stride]. If a number of x is not finite, its scale is not finite either.
inline void quantize_int4(const float *x, const Int4Layout &layout, byte *to, int64_t stride) {
  const float *second = x + layout.half;
  layout.for_each_group([&](int64_t first, int64_t end, int64_t scale_at) {
    float largest = x[first], smallest = largest, sum = 0;
    for (int64_t i = first; i < end; i++) {
      largest = std::max({largest, x[i], second[i]});
      smallest = std::min({smallest, x[i], second[i]});
      sum += x[i] * 0 + second[i] * 0;  // NaN if x is not finite, else 0
    }
    const float scale = (largest >= -smallest ? largest : smallest) / -8 + sum;
    const float divisor = write_int4_scale<GROUP_SCALE_BYTES>(scale, to + scale_at * stride, stride);
    for (int64_t i = first; i < end; i++) {
      const int low = int4_code(x[i] / divisor, -8, 7) + 8, high = int4_code(second[i] / divisor, -8, 7) + 8;
      to[i * stride] = static_cast<byte>(low | high << 4);
    }
  });
  if (!layout.n_slow) return;
  float max = 0, sum = 0;
  for (int64_t i = layout.n_packed; i < layout.half; i++) {
    max = std::max({max, std::abs(x[i]), std::abs(second[i])});
    sum += x[i] * 0 + second[i] * 0;
  }
  const float divisor = write_int4_scale<SLOW_SCALE_BYTES>(max / 127 + sum, to + layout.slow_scale() * stride, stride);
  for (int64_t i = 0; i < layout.n_slow; i++) {
    byte *codes = to + (layout.n_packed + i) * stride;
    codes[0] = static_cast<byte>(int4_code(x[layout.n_packed + i] / divisor, -127, 127));
    codes[layout.n_slow * stride] = static_cast<byte>(int4_code(second[layout.n_packed + i] / divisor, -127, 127));
  }
}

// The same scale for all numbers, or scales side by side.
struct OneScale {
  float scale;
  vec vector(int64_t) const { return broadcast(scale); }
  float operator[](int64_t) const { return scale; }
};

struct ScaleRow {
  const float *scales;
  vec vector(int64_t i) const { return load(scales + i); }
  float operator[](int64_t i) const { return scales[i]; }
};

// Unpacks n pairs whose codes are side by side. Scales have 8 bits, so that all products are exact, in any order.
template <typename Scales> inline void unpack_pairs(const byte *codes, int64_t n, Scales scales, float *first, float *second) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    const ivec pairs = load_u8(codes + i);
    const vec scale = scales.vector(i), offset = scale * -8.0f;
    store(first + i, fmadd(to_float(pairs & 15), scale, offset));
    store(second + i, fmadd(to_float(pairs >> 4), scale, offset));
  }
  for (; i < n; i++) {
    first[i] = static_cast<float>((codes[i] & 15) - 8) * scales[i];
    second[i] = static_cast<float>((codes[i] >> 4) - 8) * scales[i];
  }
}

// Dequantizes n_keys <= ROW_SIZE keys, byte i of key j at k[i * stride + j], to kt (d, ROW_SIZE).
template <int64_t ROW_SIZE> void dequantize_int4_keys(const byte *k, int64_t stride, int64_t d, int64_t n_keys, float *kt) {
  const Int4Layout layout(d, true);
  float *second = kt + layout.half * ROW_SIZE, scales[ROW_SIZE];
  const auto read_scales = [&](int64_t at, auto bytes) {
    const byte *from = k + at * stride;
    int64_t j = 0;
    for (; j + LANES <= n_keys; j += LANES) {
      ivec bits = {};
      UNROLL for (int b = 0; b < bytes; b++) bits |= load_u8(from + b * stride + j) << (32 - 8 * (bytes - b));
      store(scales + j, float_from_bits(bits));
    }
    for (; j < n_keys; j++) scales[j] = int4_scale<bytes>(from + j, stride);
  };
  const auto prefetch_next = [&](int64_t i) {  // the next keys, in the same row
    for (int64_t j = 0; j < n_keys; j += 64) prefetch(address_of(k + i * stride) + n_keys + j);
  };
  layout.for_each_group([&](int64_t first, int64_t end, int64_t scale_at) {
    read_scales(scale_at, std::integral_constant<int, GROUP_SCALE_BYTES>{});
    for (int64_t i = first; i < end; i++) {
      prefetch_next(i);
      unpack_pairs(k + i * stride, n_keys, ScaleRow{scales}, kt + i * ROW_SIZE, second + i * ROW_SIZE);
    }
  });
  if (!layout.n_slow) return;
  read_scales(layout.slow_scale(), std::integral_constant<int, SLOW_SCALE_BYTES>{});
  for (int64_t i = 0; i < 2 * layout.n_slow; i++) {
    const auto *codes = reinterpret_cast<const std::int8_t *>(k + (layout.n_packed + i) * stride);
    float *row = i < layout.n_slow ? kt + (layout.n_packed + i) * ROW_SIZE : second + (layout.n_packed + i - layout.n_slow) * ROW_SIZE;
    prefetch_next(layout.n_packed + i);
    int64_t j = 0;
    for (; j + LANES <= n_keys; j += LANES) store(row + j, load(codes + j) * load(scales + j));
    for (; j < n_keys; j++) row[j] = load_scalar(codes + j) * scales[j];
  }
}

// Dequantizes n_keys values, byte i of value j at v[j * stride + i], to out (n_keys, d).
void dequantize_int4_values(const byte *v, int64_t stride, int64_t d, int64_t n_keys, float *out) {
  const Int4Layout layout(d, false);
  for (int64_t j = 0; j < n_keys; j++, v += stride, out += d) {
    layout.for_each_group([&](int64_t first, int64_t end, int64_t scale_at) {
      const float scale = int4_scale<GROUP_SCALE_BYTES>(v + scale_at, 1);
      unpack_pairs(v + first, end - first, OneScale{scale}, out + first, out + layout.half + first);
    });
  }
}

}  // namespace
