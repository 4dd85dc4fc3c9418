// ggml's quant blocks (block_q4_0, ..., block_q6_K, block_iq4_xs, block_mxfp4 in ggml-common.h), unpacked to codes of 8 bits and scales.
//
// Blocks are read from one row, or from LANES interleaved rows (packed_rows.h). Interleaved rows give vectors with a lane for each output
// (row) and 4 codes in a lane. So one vpdpbusd multiplies 4 activations with the codes of all outputs, a scale is one vector, no horizontal
// sum is needed, and every instruction set adds up an output's blocks in one order.
//
// A format F is a struct with the numbers of its row in formats.h (QuantBlock), and two functions:
//   unpack_block(in, emit)  unpacks the block at `in`: calls emit(sub_block, w, scale, min) for each sub-block, where w(i) returns the codes
//                           of weights 4i to 4i + 3, i < COLUMNS_PER_SUB_BLOCK, and scale and min point to SCALES_PER_SUB_BLOCK numbers
//   emit_order(i)           the sub-block of the i-th call of emit. The last sub-block of an activation scale is emitted last.
// Dequantized weights have the bits of the package gguf: they are exact, or rounded once. A block's layout is in its comment: type, name and
// length of each field, as in ggml-common.h.
#pragma once

#include "kernels.h"
#include "packed_rows.h"
#include <algorithm>

namespace {

using std::int64_t;

constexpr int VECTORS_PER_SUB_BLOCK = SUB_BLOCK / LANES;
constexpr int COLUMNS_PER_SUB_BLOCK = 8;  // a column has 4 codes of each row (packed_rows.h)

// ggml's codebooks kvalues_iq4nl and kvalues_mxfp4, with the zero point added so that entries are unsigned. Entries of FP4 are twice the
// values, like ggml's.
constexpr byte IQ4NL[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr byte FP4[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// A row of QUANT_FORMATS.
struct QuantFormat {
  int weights, bytes, act_weights, scales, bits, zero;
  bool has_min;
  int int_scale, head, tail;
  const byte *codebook;

  constexpr int max_code() const {
    int max = codebook ? 0 : (1 << bits) - 1;
    for (int i = 0; codebook && i < 1 << bits; i++) max = std::max<int>(max, codebook[i]);
    return max;
  }
};

#define FORMAT_ROW(NAME, ...) {__VA_ARGS__},
constexpr QuantFormat FORMAT_ROWS[] = {QUANT_FORMATS(FORMAT_ROW)};

// The numbers of a format, and the rules that code relies on.
template <Format FORMAT>
struct QuantBlock {
  static constexpr QuantFormat ROW = FORMAT_ROWS[static_cast<int>(FORMAT) - static_cast<int>(Format::Q4_0)];
  static constexpr int WEIGHTS = ROW.weights, BYTES = ROW.bytes, HEAD_BYTES = ROW.head, TAIL_BYTES = ROW.tail, BITS = ROW.bits;
  static constexpr int SCALES_PER_SUB_BLOCK = ROW.scales, SUB_BLOCKS_PER_ACT_SCALE = ROW.act_weights / SUB_BLOCK;
  static constexpr int MAX_CODE = ROW.max_code(), ZERO_POINT = ROW.zero;
  static constexpr bool HAS_MIN = ROW.has_min, HAS_CODEBOOK = ROW.codebook;
  static constexpr const byte *CODEBOOK = ROW.codebook;
  static constexpr int emit_order(int i) { return i; }

  static_assert(WEIGHTS % ROW.act_weights == 0 && (ROW.act_weights == 32 || ROW.act_weights == 128));
  static_assert((BYTES - HEAD_BYTES - TAIL_BYTES) % 4 == 0);  // repack() interleaves units of 4 bytes
  static_assert(SCALES_PER_SUB_BLOCK == 1 || SCALES_PER_SUB_BLOCK == 2);
  static_assert(!HAS_MIN || ZERO_POINT == 0);
  static_assert(ZERO_POINT <= 128 && MAX_CODE - ZERO_POINT <= 127);  // float arithmetic stores code - ZERO_POINT as int8

  // Integer sums of the sub-blocks that share an activation scale are int32 if they exceed the 24 bits that floats represent exactly.
  static constexpr bool SHARES_ACT_SCALE = SUB_BLOCKS_PER_ACT_SCALE > 1;
  static constexpr std::int64_t MAX_FACTOR = std::max(ZERO_POINT, MAX_CODE - ZERO_POINT) * ROW.int_scale;
  static constexpr std::int64_t MAX_SUM = ROW.act_weights * 127 * MAX_FACTOR;  // activations are -127 to 127
  static constexpr bool INT32_SUMS = SHARES_ACT_SCALE && MAX_SUM >= 1 << 24;
  static_assert(MAX_SUM < std::int64_t{1} << 31);
  static_assert(!SHARES_ACT_SCALE || ROW.int_scale > 0);  // SubBlockScale

  // AMX multiplies formats that share an activation scale: two scales' weights at a time, with one min for each sub-block (Block128), and
  // with factors of weights that fit the bytes and the 16-bit products of amx::SplitWeights.
  static_assert(!SHARES_ACT_SCALE || WEIGHTS % (2 * ROW.act_weights) == 0);
  static_assert(!SHARES_ACT_SCALE || !HAS_MIN || SCALES_PER_SUB_BLOCK == 1);
  static_assert(!SHARES_ACT_SCALE || (ZERO_POINT > 0 ? MAX_CODE * ROW.int_scale < 1 << 15 && ROW.int_scale <= 128
                                                     : MAX_CODE * 7 <= 255 && ROW.int_scale < 64));
};

template <typename I> ALWAYS_INLINE inline I low_nibbles(I x) { return x & 0x0f0f0f0f; }
template <typename I> ALWAYS_INLINE inline I high_nibbles(I x) { return x >> 4 & 0x0f0f0f0f; }

// Returns two numbers of 16 bits in one of 32.
template <typename I> ALWAYS_INLINE inline I pack_halves(I low, I high) { return (low & 0xffff) + high * 65536; }

// Takes the bits of x where the mask is 1, and the bits of y elsewhere.
template <typename I> ALWAYS_INLINE inline I blend_bits(I x, I y, std::int32_t mask) { return (x & mask) | (y & ~mask); }

// Returns column i of 32 codes of 4 bits in 16 bytes (4 columns): weights 0 to 15 are in low nibbles, weights 16 to 31 in high nibbles.
template <typename Columns>
ALWAYS_INLINE inline auto nibble(const Columns &bytes, int i) { return i < 4 ? low_nibbles(bytes[i]) : high_nibbles(bytes[i - 4]); }
template <typename Columns> ALWAYS_INLINE inline int32x8 nibble(const Columns &bytes, AllColumns i) {
  return bytes[i] >> int32x8{0, 0, 0, 0, 4, 4, 4, 4} & 0x0f0f0f0f;
}

// Returns the fifth bits of column i's codes, from qh of Q5_0 and Q5_1: moves bits 4i to 4i + 3 of a lane to bit 4 of its four bytes.
ALWAYS_INLINE inline ivec fifth_bits(ivec bits, int i) { return spread_bits(bits >> (4 * i)); }
ALWAYS_INLINE inline int32x8 fifth_bits(std::int32_t bits, AllColumns) {
  return (bits >> int32x8{0, 4, 8, 12, 16, 20, 24, 28} & 15) * 0x02040810 & 0x10101010;
}

// Q4_0: {fp16 d; u8 qs[16]}. Q5_0: {fp16 d; u8 qh[4]; u8 qs[16]}. ggml's type-0: weight = d * (code - ZERO_POINT).
template <Format FORMAT>
struct Type0 : QuantBlock<FORMAT> {
  static constexpr int BITS = QuantBlock<FORMAT>::BITS;
  template <typename In, typename Emit> ALWAYS_INLINE static void unpack_block(In in, const Emit &emit) {
    const auto bytes = columns<4>(in.advance(4 * BITS - 14));  // qs, at byte 2 or 6
    const auto bits = in.advance(2).u32();
    const auto scale = in.fp16();
    emit(0, [&](auto i) { return BITS == 5 ? nibble(bytes, i) | fifth_bits(bits, i) : nibble(bytes, i); }, &scale, nullptr);
  }
};

// Q4_1: {fp16 d, m; u8 qs[16]}. Q5_1: {fp16 d, m; u8 qh[4]; u8 qs[16]}. ggml's type-1: weight = d * code + m.
template <Format FORMAT>
struct Type1 : QuantBlock<FORMAT> {
  static constexpr int BITS = QuantBlock<FORMAT>::BITS;
  template <typename In, typename Emit> ALWAYS_INLINE static void unpack_block(In in, const Emit &emit) {
    const auto bytes = columns<4>(in.advance(4 * BITS - 12));  // qs, at byte 4 or 8
    const auto d_m = in.u32(), bits = in.advance(4).u32();
    const auto scale = fp16_to_float(d_m), min = fp16_to_float(d_m >> 16);
    emit(0, [&](auto i) { return BITS == 5 ? nibble(bytes, i) | fifth_bits(bits, i) : nibble(bytes, i); }, &scale, &min);
  }
};

// {fp16 d; i8 qs[32]}. Sign bits are flipped, which adds 128 and so makes codes unsigned.
struct Q8_0 : QuantBlock<Format::Q8_0> {
  template <typename In, typename Emit> ALWAYS_INLINE static void unpack_block(In in, const Emit &emit) {
    const auto bytes = columns<8>(in.advance(2));
    const auto scale = in.fp16();
    emit(0, [&](auto i) { return bytes[i] ^ static_cast<std::int32_t>(0x80808080); }, &scale, nullptr);
  }
};

// {fp16 d; u8 qs[16]}.
struct IQ4_NL : QuantBlock<Format::IQ4_NL> {
  template <typename In, typename Emit> ALWAYS_INLINE static void unpack_block(In in, const Emit &emit) {
    const auto bytes = columns<4>(in.advance(2));
    const auto scale = in.fp16();
    emit(0, [&](auto i) { return nibble(bytes, i); }, &scale, nullptr);
  }
};

// {u8 e; u8 qs[16]}: e is the exponent of the scale.
struct MXFP4 : QuantBlock<Format::MXFP4> {
  template <typename In, typename Emit> ALWAYS_INLINE static void unpack_block(In in, const Emit &emit) {
    const auto bytes = columns<4>(in.advance(1));
    // The scale is 2^(e - 128), as in GGML_E8M0_TO_FP32_HALF: for e < 2 a subnormal float, whose exponent bits are 0.
    const auto e = in.u8(), subnormal = ((e & 1) << 21) + (1 << 21);
    const auto scale = float_from_bits(e < 2 ? subnormal : (e - 1) << 23);
    emit(0, [&](auto i) { return nibble(bytes, i); }, &scale, nullptr);
  }
};

// The scale of an interleaved sub-block as two factors: d of the block, and the integer that ggml calls sc or scales[i].
struct SubBlockScale {
  vec d;
  ivec int_scale;

  ALWAYS_INLINE operator vec() const { return d * to_float(int_scale); }
};
ALWAYS_INLINE inline SubBlockScale make_scale(vec d, ivec int_scale) { return {d, int_scale}; }
ALWAYS_INLINE inline vec make_scale(vec d, std::int32_t int_scale) { return d * to_float(int_scale); }

// The scales of a block's sub-blocks, d * (byte - OFFSET), for interleaved rows. bytes: 4 in each of N columns.
template <int N, int OFFSET = 0>
struct InterleavedScales {
  vec d;
  ivec bytes[N];

  ALWAYS_INLINE SubBlockScale operator[](int i) const { return {d, (bytes[i / 4] >> (i % 4 * 8) & 255) - OFFSET}; }
};

// These scales for a single row, with the bytes of columns c0 to c3.
template <int N, int OFFSET = 0>
struct RowScales {
  float values[16];

  ALWAYS_INLINE RowScales(vec d, std::int32_t c0, std::int32_t c1, std::int32_t c2 = 0, std::int32_t c3 = 0) {
    const int32x8 columns{c0, c1, c2, c3};
    byte bytes[32];
    std::memcpy(bytes, &columns, sizeof bytes);
    for (int i = 0; i < 4 * N; i += LANES) store(values + i, to_float(load_u8(bytes + i) - OFFSET) * d);
  }
  ALWAYS_INLINE vec operator[](int i) const { return broadcast(values[i]); }
};

template <int OFFSET = 0, typename... Columns>
ALWAYS_INLINE inline auto unpack_scales(vec d, Columns... columns) {
  constexpr int N = sizeof...(columns);
  if constexpr ((std::is_same_v<Columns, ivec> && ...)) {
    return InterleavedScales<N, OFFSET>{d, {columns...}};
  } else {
    return RowScales<N, OFFSET>(d, columns...);
  }
}

// {u8 scales[16]; u8 qs[64]; fp16 d, dmin}. Codes of 2 bits. scales[i]: for weights 16i to 16i + 15, a scale in the low nibble and a min in
// the high nibble. Bits 2p and 2p + 1 of qs[32h] to qs[32h + 31] are the codes of sub-block 4h + p.
struct Q2_K : QuantBlock<Format::Q2_K> {
  template <typename In, typename Emit> ALWAYS_INLINE static void unpack_block(In in, const Emit &emit) {
    const auto a = in.u32(), b = in.advance(4).u32(), c = in.advance(8).u32(), d = in.advance(12).u32(), d_dmin = in.advance(80).u32();
    const auto scale = unpack_scales(fp16_to_float(d_dmin), low_nibbles(a), low_nibbles(b), low_nibbles(c), low_nibbles(d));
    const auto min = unpack_scales(-fp16_to_float(d_dmin >> 16), high_nibbles(a), high_nibbles(b), high_nibbles(c), high_nibbles(d));
    for (int half = 0; half < 2; half++) {
      const auto bytes = columns<8>(in.advance(16 + half * 32));
      for (int p = 0; p < 4; p++) {
        const int sub_block = 4 * half + p;
        const decltype(scale[0]) sub_scales[] = {scale[2 * sub_block], scale[2 * sub_block + 1]};
        const vec sub_mins[] = {min[2 * sub_block], min[2 * sub_block + 1]};
        emit(sub_block, [&](auto i) { return bytes[i] >> (p * 2) & 0x03030303; }, sub_scales, sub_mins);
      }
    }
  }
};

// {u8 hmask[32]; u8 qs[64]; u8 scales[12]; fp16 d}. Codes of 3 bits: the lower 2 in qs as in Q2_K, the upper one of sub-block i in bit i of
// hmask. Scales of 6 bits for each 16 weights: the lower 4 bits in scales[0] to [7], the upper 2 in scales[8] to [11].
struct Q3_K : QuantBlock<Format::Q3_K> {
  template <typename In, typename Emit> ALWAYS_INLINE static void unpack_block(In in, const Emit &emit) {
    const auto high = columns<8>(in);
    const auto a = in.advance(96).u32(), b = in.advance(100).u32(), upper = in.advance(104).u32();
    const auto add_high_bits = [&](auto low, int column) { return low | (upper >> (2 * column) & 0x03030303) << 4; };
    const auto scale = unpack_scales<32>(in.advance(108).fp16(), add_high_bits(low_nibbles(a), 0), add_high_bits(low_nibbles(b), 1),
                                  add_high_bits(high_nibbles(a), 2), add_high_bits(high_nibbles(b), 3));
    for (int half = 0; half < 2; half++) {
      const auto bytes = columns<8>(in.advance(32 + half * 32));
      for (int p = 0; p < 4; p++) {
        const int sub_block = 4 * half + p;
        const decltype(scale[0]) sub_scales[] = {scale[2 * sub_block], scale[2 * sub_block + 1]};
        const auto w = [&](auto i) { return (bytes[i] >> (p * 2) & 0x03030303) | (high[i] >> sub_block & 0x01010101) << 2; };
        emit(sub_block, w, sub_scales, nullptr);
      }
    }
  }
};

// Q4_K: {fp16 d, dmin; u8 scales[12]; u8 qs[128]}. Q5_K: {fp16 d, dmin; u8 scales[12]; u8 qh[32]; u8 qs[128]}. Scales and mins have 6 bits.
// Sub-blocks 2p and 2p + 1 are the low and the high nibbles of qs[32p] to qs[32p + 31]; the fifth bits of sub-block i are bits i of qh.
template <Format FORMAT>
struct Q45_K : QuantBlock<FORMAT> {
  static constexpr int BITS = QuantBlock<FORMAT>::BITS;
  template <typename In, typename Emit> ALWAYS_INLINE static void unpack_block(In in, const Emit &emit) {
    // As get_scale_min_k4: the 12 bytes of scales are 3 columns of 4. Bytes of `scales` and `mins` have the 6 bits of sub-blocks 0 to 3, and
    // above them the upper 2 bits of sub-blocks 4 to 7, whose lower 4 bits are in `last`.
    const auto d_dmin = in.u32(), scales = in.advance(4).u32(), mins = in.advance(8).u32(), last = in.advance(12).u32();
    const auto scale = unpack_scales(fp16_to_float(d_dmin), scales & 0x3f3f3f3f, low_nibbles(last) | (scales >> 2 & 0x30303030));
    const auto min = unpack_scales(-fp16_to_float(d_dmin >> 16), mins & 0x3f3f3f3f, high_nibbles(last) | (mins >> 2 & 0x30303030));
    auto high = columns<8>(in.advance(16));  // qh of Q5_K; Q4_K does not use it
    for (int pair = 0; pair < 4; pair++) {
      const auto bytes = columns<8>(in.advance(32 * BITS - 112 + 32 * pair));  // qs begins at byte 16 or 48
      UNROLL for (int upper = 0; upper < 2; upper++) {
        const auto w = [&](auto i) {
          if constexpr (BITS == 4) return upper ? high_nibbles(bytes[i]) : low_nibbles(bytes[i]);
          return blend_bits(upper ? bytes[i] >> 4 : bytes[i], high[i] << (4 - upper), 0x0f0f0f0f) & 0x1f1f1f1f;
        };
        const auto sub_scales = scale[2 * pair + upper];
        const vec sub_min = min[2 * pair + upper];
        emit(2 * pair + upper, w, &sub_scales, &sub_min);
      }
      if constexpr (BITS == 5) high.shift_right(2);
    }
  }
};

// {u8 ql[128]; u8 qh[64]; i8 scales[16]; fp16 d}. Codes of 6 bits: the lower 4 in ql, the upper 2 in qh. An int8 scale for each 16 weights.
struct Q6_K : QuantBlock<Format::Q6_K> {
  static constexpr int emit_order(int i) { return (i & 4) | (i & 1) << 1 | (i & 2) >> 1; }
  template <typename In, typename Emit> ALWAYS_INLINE static void unpack_block(In in, const Emit &emit) {
    // Sign bits of scales are flipped, which adds 128; unpack_scales<128> subtracts it.
    const auto scale_column = [&](int i) { return in.advance(192 + 4 * i).u32() ^ static_cast<std::int32_t>(0x80808080); };
    const auto scale = unpack_scales<128>(in.advance(208).fp16(), scale_column(0), scale_column(1), scale_column(2), scale_column(3));
    // Each half of the block has 64 bytes of ql and 32 of qh. Sub-block 4 half + 2 upper + byte_half takes ql's low or high nibbles,
    // and two bits of qh.
    for (int half = 0; half < 2; half++) {
      const auto high = columns<8>(in.advance(128 + 32 * half));
      UNROLL for (int byte_half = 0; byte_half < 2; byte_half++) {
        const auto low = columns<8>(in.advance(64 * half + 32 * byte_half));
        UNROLL for (int upper = 0; upper < 2; upper++) {
          const int sub_block = 4 * half + 2 * upper + byte_half;
          const decltype(scale[0]) sub_scales[] = {scale[2 * sub_block], scale[2 * sub_block + 1]};
          const auto w = [&](auto i) {
            const auto bits = upper ? high[i] >> (2 * byte_half) : high[i] << (4 - 2 * byte_half);
            return blend_bits(upper ? low[i] >> 4 : low[i], bits, 0x0f0f0f0f) & 0x3f3f3f3f;
          };
          emit(sub_block, w, sub_scales, nullptr);
        }
      }
    }
  }
};

// {fp16 d; u16 scales_h; u8 scales_l[4]; u8 qs[128]}. Codebook indices of 4 bits; a scale of 6 bits for each sub-block i: its lower 4 are
// bits 4i to 4i + 3 of scales_l, its upper 2 are bits 2i and 2i + 1 of scales_h.
struct IQ4_XS : QuantBlock<Format::IQ4_XS> {
  template <typename In, typename Emit> ALWAYS_INLINE static void unpack_block(In in, const Emit &emit) {
    const auto d_scales_h = in.u32(), scales_l = in.advance(4).u32();
    const auto d = fp16_to_float(d_scales_h);
    for (int sub_block = 0; sub_block < 8; sub_block++) {
      const auto bytes = columns<4>(in.advance(8 + 16 * sub_block));
      const auto int_scale = (scales_l >> (4 * sub_block) & 15) | (d_scales_h >> (16 + 2 * sub_block) & 3) << 4;
      const auto sub_scales = make_scale(d, int_scale - 32);
      emit(sub_block, [&](auto i) { return nibble(bytes, i); }, &sub_scales, nullptr);
    }
  }
};

typedef Type0<Format::Q4_0> Q4_0;
typedef Type0<Format::Q5_0> Q5_0;
typedef Type1<Format::Q4_1> Q4_1;
typedef Type1<Format::Q5_1> Q5_1;
typedef Q45_K<Format::Q4_K> Q4_K;
typedef Q45_K<Format::Q5_K> Q5_K;

// True if the sub-blocks of an activation scale are emitted together, the last of them last.
template <typename F> constexpr bool keeps_act_scales() {
  for (int i = 0; i < F::WEIGHTS / SUB_BLOCK; i++) {
    const int sub_block = F::emit_order(i), scale = i / F::SUB_BLOCKS_PER_ACT_SCALE, last = (scale + 1) * F::SUB_BLOCKS_PER_ACT_SCALE - 1;
    if (sub_block / F::SUB_BLOCKS_PER_ACT_SCALE != scale || (sub_block == last) != (i == last)) return false;
  }
  return true;
}

// Calls f(F{}) with the quantized format F. Stops the process for any other format, which is a bug of a caller.
template <typename Fn> inline void dispatch_format(Format format, const Fn &f) {
  switch (format) {
#define CASE(NAME, ...)                    \
  static_assert(keeps_act_scales<NAME>()); \
  case Format::NAME: return f(NAME{});
    QUANT_FORMATS(CASE)
#undef CASE
    default: __builtin_trap();
  }
}

}  // namespace
