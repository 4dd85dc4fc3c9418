// ggml's quant blocks (ggml-quants: block_q4_0, ..., block_q6_K, block_iq4_xs, block_mxfp4), unpacked to 8-bit codes and scales.
//
// Blocks are read from one row, or from LANES interleaved rows (packed_rows.h). The latter give vectors with a lane for each row
// (output) and 4 codes in a lane. So one dpbusd multiplies 4 activations with the codes of all outputs, a scale is one vector, no
// horizontal sum is needed, and every instruction set adds up an output's blocks in one order.
//
// A format F has WEIGHTS and BYTES of a block, and block(in, emit), which unpacks one into sub-blocks of 32 weights and calls
// emit(sub_block, w, scale, min) for each: w(i) gives the codes of weights 4i to 4i + 3, i < COLUMNS_PER_SUB_BLOCK.
//   HEAD_BYTES, TAIL_BYTES  bytes before and after the units of 4 bytes that are interleaved (packed_rows.h)
//   SCALES         scales of a sub-block: 1, or 2 (one for 16 weights)
//   HAS_MIN        weight = scale * code + min; else weight = scale * (code - ZERO_POINT). MAX_CODE: the largest (unsigned) code
//   HAS_CODEBOOK   w(i) gives indices into CODEBOOK, whose entries are codes
//   SUB_BLOCKS_PER_SCALE  sub-blocks that share one activation scale (matmul.h): 4 in blocks of 256 weights, whose scales are d times an
//                  integer, so that integer sums of 4 sub-blocks are added before they are scaled; else 1
//   INT32_SUMS     these integer sums exceed the 24 bits that floats represent exactly
//   emit_order(i)  the sub-block of the i-th call of emit; the last sub-block of an activation scale is emitted last
// Weights as floats have gguf's bits: exact, or rounded once.
#pragma once

#include "kernels.h"
#include "packed_rows.h"

namespace {

using std::int64_t;

constexpr int SUB_BLOCK = 32, VECTORS_PER_SUB_BLOCK = SUB_BLOCK / LANES;
constexpr int COLUMNS_PER_SUB_BLOCK = 8;  // vectors with 4 codes of each output

template <int N, int SIZE, int N_SCALES, int HEAD = 0, int TAIL = 0>
struct QuantBlock {
  static constexpr int WEIGHTS = N, BYTES = SIZE, SCALES = N_SCALES, HEAD_BYTES = HEAD, TAIL_BYTES = TAIL;
  static constexpr int SUB_BLOCKS_PER_SCALE = N == 256 ? 4 : 1;
  static constexpr bool HAS_CODEBOOK = false, INT32_SUMS = false;
  static constexpr int emit_order(int i) { return i; }
};

template <typename I> ALWAYS_INLINE inline I low_nibbles(I x) { return x & 0x0f0f0f0f; }
template <typename I> ALWAYS_INLINE inline I high_nibbles(I x) { return x >> 4 & 0x0f0f0f0f; }

// Bits of x where the mask is 1, of y elsewhere.
template <typename I> ALWAYS_INLINE inline I blend_bits(I x, I y, std::int32_t mask) { return (x & mask) | (y & ~mask); }

// Column i of 32 nibbles in 16 bytes (4 columns): the low nibbles are weights 0 to 15, the high ones 16 to 31.
template <typename Columns>
ALWAYS_INLINE inline auto nibble(const Columns &bytes, int i) { return i < 4 ? low_nibbles(bytes[i]) : high_nibbles(bytes[i - 4]); }
template <typename Columns>
ALWAYS_INLINE inline int32x8 nibble(const Columns &bytes, AllColumns i) {
  return bytes[i] >> int32x8{0, 0, 0, 0, 4, 4, 4, 4} & 0x0f0f0f0f;
}

// The fifth bits of codes, from qh of block_q5_0 and block_q5_1: moves bits 4i to 4i + 3 of a lane to bit 4 of its four bytes.
ALWAYS_INLINE inline ivec fifth_bits(ivec bits, int i) {
#if defined(__AVX512F__)
  // Looks the product up by the lowest 4 bits, because vpmulld is slow.
  const ivec index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, spread = index * 0x02040810 & 0x10101010;
  return (ivec)_mm512_permutexvar_epi32((__m512i)(bits >> (4 * i)), (__m512i)spread);
#else
  return (bits >> (4 * i) & 15) * 0x02040810 & 0x10101010;
#endif
}
ALWAYS_INLINE inline int32x8 fifth_bits(std::int32_t bits, AllColumns) {
  return (bits >> int32x8{0, 4, 8, 12, 16, 20, 24, 28} & 15) * 0x02040810 & 0x10101010;
}

// Q4_0 {d, qs} and Q5_0 {d, qh, qs}, ggml's type-0: w = d * (q - ZERO_POINT).
template <int BITS>
struct Type0 : QuantBlock<32, 2 + 4 * BITS, 1, 2> {
  static constexpr int MAX_CODE = (1 << BITS) - 1, ZERO_POINT = 1 << (BITS - 1);
  static constexpr bool HAS_MIN = false;
  template <typename In, typename Emit>
  ALWAYS_INLINE static void block(In in, const Emit &emit) {
    const auto bytes = columns<4>(in.advance(4 * BITS - 14));
    const auto bits = in.advance(2).u32();
    const auto scale = in.fp16();
    emit(0, [&](auto i) { return BITS == 5 ? nibble(bytes, i) | fifth_bits(bits, i) : nibble(bytes, i); }, &scale, nullptr);
  }
};

// Q4_1 {d, m, qs} and Q5_1 {d, m, qh, qs}, ggml's type-1: w = d * q + m.
template <int BITS>
struct Type1 : QuantBlock<32, 4 + 4 * BITS, 1> {
  static constexpr int MAX_CODE = (1 << BITS) - 1, ZERO_POINT = 0;
  static constexpr bool HAS_MIN = true;
  template <typename In, typename Emit>
  ALWAYS_INLINE static void block(In in, const Emit &emit) {
    const auto bytes = columns<4>(in.advance(4 * BITS - 12));
    const auto d_m = in.u32(), bits = in.advance(4).u32();
    const auto scale = fp16_to_float(d_m), min = fp16_to_float(d_m >> 16);
    emit(0, [&](auto i) { return BITS == 5 ? nibble(bytes, i) | fifth_bits(bits, i) : nibble(bytes, i); }, &scale, &min);
  }
};

// {d, qs}: the sign bit is flipped, which makes codes unsigned.
struct Q8_0 : QuantBlock<32, 34, 1, 2> {
  static constexpr int MAX_CODE = 255, ZERO_POINT = 128;
  static constexpr bool HAS_MIN = false;
  template <typename In, typename Emit>
  ALWAYS_INLINE static void block(In in, const Emit &emit) {
    const auto bytes = columns<8>(in.advance(2));
    const auto scale = in.fp16();
    emit(0, [&](auto i) { return bytes[i] ^ static_cast<std::int32_t>(0x80808080); }, &scale, nullptr);
  }
};

// Codebooks (kvalues_iq4nl, kvalues_mxfp4), with ZERO_POINT added so that entries are unsigned.
struct IQ4Codebook {
  static constexpr int ZERO_POINT = 128, MAX_CODE = 241;
  static constexpr bool HAS_MIN = false, HAS_CODEBOOK = true;
  static constexpr byte CODEBOOK[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
};
struct MXFP4Codebook {  // entries are twice the values, like ggml's
  static constexpr int ZERO_POINT = 12, MAX_CODE = 24;
  static constexpr bool HAS_MIN = false, HAS_CODEBOOK = true;
  static constexpr byte CODEBOOK[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
};

struct IQ4_NL : QuantBlock<32, 18, 1, 2>, IQ4Codebook {
  using IQ4Codebook::HAS_CODEBOOK;
  template <typename In, typename Emit>
  ALWAYS_INLINE static void block(In in, const Emit &emit) {
    const auto bytes = columns<4>(in.advance(2));
    const auto scale = in.fp16();
    emit(0, [&](auto i) { return nibble(bytes, i); }, &scale, nullptr);
  }
};

struct MXFP4 : QuantBlock<32, 17, 1, 1>, MXFP4Codebook {
  using MXFP4Codebook::HAS_CODEBOOK;
  template <typename In, typename Emit>
  ALWAYS_INLINE static void block(In in, const Emit &emit) {
    const auto bytes = columns<4>(in.advance(1));
    // 2^(e - 128), as GGML_E8M0_TO_FP32_HALF: subnormal for e < 2.
    const auto e = in.u8(), subnormal = ((e & 1) << 21) + (1 << 21);
    const auto scale = float_from_bits(e < 2 ? subnormal : (e - 1) << 23);
    emit(0, [&](auto i) { return nibble(bytes, i); }, &scale, nullptr);
  }
};

// The scale of an interleaved sub-block, kept as two factors: the block's d and the sub-block's integer sc.
struct SubBlockScale {
  vec d;
  ivec sc;

  ALWAYS_INLINE operator vec() const { return d * to_float(sc); }
};
ALWAYS_INLINE inline SubBlockScale make_scale(vec d, ivec sc) { return {d, sc}; }
ALWAYS_INLINE inline vec make_scale(vec d, std::int32_t sc) { return d * to_float(sc); }

// Scales d * (byte - OFFSET) of a block's sub-blocks, from N columns with 4 bytes each.
template <int N, int OFFSET = 0>
struct InterleavedScales {
  vec scale;
  ivec bytes[N];

  ALWAYS_INLINE SubBlockScale operator[](int i) const { return {scale, (bytes[i / 4] >> (i % 4 * 8) & 255) - OFFSET}; }
};

template <int N, int OFFSET = 0>
struct RowScales {
  float values[16];

  ALWAYS_INLINE RowScales(vec scale, std::int32_t a, std::int32_t b, std::int32_t c = 0, std::int32_t d = 0) {
    const int32x8 columns{a, b, c, d};
    byte bytes[32];
    std::memcpy(bytes, &columns, sizeof bytes);
    for (int i = 0; i < 4 * N; i += LANES) store(values + i, to_float(load_u8(bytes + i) - OFFSET) * scale);
  }
  ALWAYS_INLINE vec operator[](int i) const { return broadcast(values[i]); }
};

template <int OFFSET = 0, typename... Columns>
ALWAYS_INLINE inline auto unpack_scales(vec scale, Columns... columns) {
  constexpr int N = sizeof...(columns);
  if constexpr ((std::is_same_v<Columns, ivec> && ...)) {
    return InterleavedScales<N, OFFSET>{scale, {columns...}};
  } else {
    return RowScales<N, OFFSET>(scale, columns...);
  }
}

// {scales, qs, d, dmin}: 2-bit codes; a 4-bit scale and a 4-bit min for each 16 weights.
struct Q2_K : QuantBlock<256, 84, 2> {
  static constexpr int MAX_CODE = 3, ZERO_POINT = 0, SUB_BLOCKS_PER_SCALE = 1;  // no AMX: mins are for 16 weights
  static constexpr bool HAS_MIN = true;
  template <typename In, typename Emit>
  ALWAYS_INLINE static void block(In in, const Emit &emit) {
    const auto a = in.u32(), b = in.advance(4).u32(), c = in.advance(8).u32(), d = in.advance(12).u32(), d_dmin = in.advance(80).u32();
    const auto scale = unpack_scales(fp16_to_float(d_dmin), low_nibbles(a), low_nibbles(b), low_nibbles(c), low_nibbles(d));
    const auto min = unpack_scales(-fp16_to_float(d_dmin >> 16), high_nibbles(a), high_nibbles(b), high_nibbles(c), high_nibbles(d));
    for (int half = 0; half < 2; half++) {
      const auto bytes = columns<8>(in.advance(16 + half * 32));
      for (int pair = 0; pair < 4; pair++) {
        const int sub_block = 4 * half + pair;
        const decltype(scale[0]) sub_scales[] = {scale[2 * sub_block], scale[2 * sub_block + 1]};
        const vec sub_mins[] = {min[2 * sub_block], min[2 * sub_block + 1]};
        emit(sub_block, [&](auto i) { return bytes[i] >> (pair * 2) & 0x03030303; }, sub_scales, sub_mins);
      }
    }
  }
};

// {hmask, qs, scales, d}: 2 + 1 bits; a 6-bit scale for each 16 weights.
struct Q3_K : QuantBlock<256, 110, 2, 0, 2> {
  static constexpr int MAX_CODE = 7, ZERO_POINT = 4;
  static constexpr bool HAS_MIN = false;
  template <typename In, typename Emit>
  ALWAYS_INLINE static void block(In in, const Emit &emit) {
    const auto high = columns<8>(in);
    const auto a = in.advance(96).u32(), b = in.advance(100).u32(), upper = in.advance(104).u32();
    const auto add_high_bits = [&](auto low, int pair) { return low | (upper >> (2 * pair) & 0x03030303) << 4; };
    const auto scale = unpack_scales<32>(in.advance(108).fp16(), add_high_bits(low_nibbles(a), 0), add_high_bits(low_nibbles(b), 1),
                                  add_high_bits(high_nibbles(a), 2), add_high_bits(high_nibbles(b), 3));
    for (int half = 0; half < 2; half++) {
      const auto bytes = columns<8>(in.advance(32 + half * 32));
      for (int pair = 0; pair < 4; pair++) {
        const int sub_block = 4 * half + pair;
        const decltype(scale[0]) sub_scales[] = {scale[2 * sub_block], scale[2 * sub_block + 1]};
        const auto w = [&](auto i) { return (bytes[i] >> (pair * 2) & 0x03030303) | (high[i] >> sub_block & 0x01010101) << 2; };
        emit(sub_block, w, sub_scales, nullptr);
      }
    }
  }
};

// Q4_K {d, dmin, scales, qs} and Q5_K {d, dmin, scales, qh, qs}.
template <int BITS>
struct Q45_K : QuantBlock<256, 16 + 32 * BITS, 1> {
  static constexpr int MAX_CODE = (1 << BITS) - 1, ZERO_POINT = 0;
  static constexpr bool HAS_MIN = true, INT32_SUMS = BITS == 5;
  template <typename In, typename Emit>
  ALWAYS_INLINE static void block(In in, const Emit &emit) {
    // get_scale_min_k4: 6-bit scales and mins. Of sub-blocks 4 to 7 the lower 4 bits are in the last column, the upper 2 above the
    // bits of sub-blocks 0 to 3.
    const auto d_dmin = in.u32(), a = in.advance(4).u32(), b = in.advance(8).u32(), last = in.advance(12).u32();
    const auto scale = unpack_scales(fp16_to_float(d_dmin), a & 0x3f3f3f3f, low_nibbles(last) | (a >> 2 & 0x30303030));
    const auto min = unpack_scales(-fp16_to_float(d_dmin >> 16), b & 0x3f3f3f3f, high_nibbles(last) | (b >> 2 & 0x30303030));
    auto high = columns<8>(in.advance(16));
    for (int pair = 0; pair < 4; pair++) {
      const auto bytes = columns<8>(in.advance(32 * BITS - 112 + 32 * pair));
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

// {ql, qh, scales, d}: 4 + 2 bits; an int8 scale for each 16 weights.
struct Q6_K : QuantBlock<256, 210, 2, 0, 2> {
  static constexpr int MAX_CODE = 63, ZERO_POINT = 32;
  static constexpr bool HAS_MIN = false, INT32_SUMS = true;
  static constexpr int emit_order(int i) { return (i & 4) | (i & 1) << 1 | (i & 2) >> 1; }
  template <typename In, typename Emit>
  ALWAYS_INLINE static void block(In in, const Emit &emit) {
    const auto scale_column = [&](int i) {
      return in.advance(192 + 4 * i).u32() ^ static_cast<std::int32_t>(0x80808080);
    };  // int8: flips the sign bit
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

// {d, scales_h, scales_l, qs}: codebook indices; a 6-bit scale for each 32 weights.
struct IQ4_XS : QuantBlock<256, 136, 1>, IQ4Codebook {
  static constexpr bool INT32_SUMS = true;
  using IQ4Codebook::HAS_CODEBOOK;
  template <typename In, typename Emit>
  ALWAYS_INLINE static void block(In in, const Emit &emit) {
    const auto d_scales_h = in.u32(), scales_l = in.advance(4).u32();
    const auto d = fp16_to_float(d_scales_h);
    for (int sub_block = 0; sub_block < 8; sub_block++) {
      const auto bytes = columns<4>(in.advance(8 + 16 * sub_block));
      const auto s = (scales_l >> (4 * sub_block) & 15) | (d_scales_h >> (16 + 2 * sub_block) & 3) << 4;
      const auto sub_scales = make_scale(d, s - 32);
      emit(sub_block, [&](auto i) { return nibble(bytes, i); }, &sub_scales, nullptr);
    }
  }
};

// Calls f(F{}) with the quantized format F. Stops the process for any other format, which is a bug of a caller.
template <typename Fn>
inline void dispatch_format(Format format, const Fn &f) {
  switch (format) {
    case Format::Q4_0: return f(Type0<4>{});
    case Format::Q5_0: return f(Type0<5>{});
    case Format::Q4_1: return f(Type1<4>{});
    case Format::Q5_1: return f(Type1<5>{});
    case Format::Q8_0: return f(Q8_0{});
    case Format::Q2_K: return f(Q2_K{});
    case Format::Q3_K: return f(Q3_K{});
    case Format::Q4_K: return f(Q45_K<4>{});
    case Format::Q5_K: return f(Q45_K<5>{});
    case Format::Q6_K: return f(Q6_K{});
    case Format::IQ4_NL: return f(IQ4_NL{});
    case Format::IQ4_XS: return f(IQ4_XS{});
    case Format::MXFP4: return f(MXFP4{});
    default: __builtin_trap();
  }
}

}  // namespace
