// The formats of weights. A format of ggml's quant blocks is one row of QUANT_FORMATS, which header.py reads too. The rules for its numbers
// are in quants.h, the layout of a block's bytes is there with the code that unpacks it.
#pragma once

#include <cstdint>

//   weights, bytes  of a block, which consists of sub-blocks of 32 weights
//   act_weights     activations that share a scale in int8 arithmetic (matmul.h): 32; or 128, if weights' scales are d times an integer, so
//                   that integer sums of 4 sub-blocks are added up before they are scaled
//   scales          of a sub-block: 1, or 2: one for each 16 weights
//   bits            of a code
//   zero            zero point: weight = scale * (code - zero)
//   min             true: weight = scale * code + min
//   int_scale       largest magnitude of the integers that d is multiplied by; 0: scales are no such products
//   head, tail      bytes of a block before and after the units of 4 bytes that are interleaved (packed_rows.h)
//   codebook        the values of codes (quants.h); null: codes are values
//
//    name    weights  bytes  act_weights  scales  bits  zero    min  int_scale  head  tail  codebook
#define QUANT_FORMATS(ROW)                                                                            \
  ROW(Q4_0,        32,    18,          32,      1,    4,    8, false,         0,    2,    0, nullptr) \
  ROW(Q5_0,        32,    22,          32,      1,    5,   16, false,         0,    2,    0, nullptr) \
  ROW(Q4_1,        32,    20,          32,      1,    4,    0,  true,         0,    0,    0, nullptr) \
  ROW(Q5_1,        32,    24,          32,      1,    5,    0,  true,         0,    0,    0, nullptr) \
  ROW(Q8_0,        32,    34,          32,      1,    8,  128, false,         0,    2,    0, nullptr) \
  ROW(Q2_K,       256,    84,          32,      2,    2,    0,  true,        15,    0,    0, nullptr) \
  ROW(Q3_K,       256,   110,         128,      2,    3,    4, false,        32,    0,    2, nullptr) \
  ROW(Q4_K,       256,   144,         128,      1,    4,    0,  true,        63,    0,    0, nullptr) \
  ROW(Q5_K,       256,   176,         128,      1,    5,    0,  true,        63,    0,    0, nullptr) \
  ROW(Q6_K,       256,   210,         128,      2,    6,   32, false,       128,    0,    2, nullptr) \
  ROW(IQ4_NL,      32,    18,          32,      1,    4,  128, false,         0,    2,    0, IQ4NL)   \
  ROW(IQ4_XS,     256,   136,         128,      1,    4,  128, false,        32,    0,    0, IQ4NL)   \
  ROW(MXFP4,       32,    17,          32,      1,    4,   12, false,         0,    1,    0, FP4)

// All formats: float32, quant blocks, 16-bit floats, and float32 stored as (n_in, n_out).
#define FORMAT_NAME(NAME, ...) NAME,
enum class Format : std::int64_t { FLOAT32, QUANT_FORMATS(FORMAT_NAME) BF16, F16, FLOAT32_TRANSPOSED };
