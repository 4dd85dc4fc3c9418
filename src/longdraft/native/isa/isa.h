// Chooses the file of the instruction set that is compiled for. Each of these files defines (AMX is in amx.h):
//   vec, ivec                     vectors of LANES floats and int32, by GNU C++'s vector extensions, which clang has too
//   MAX_SUMS                      accumulators of a register tile; the other registers hold its operands
//   fmadd(a, b, c)                a * b + c, rounded once
//   load_u8, _i8, _u16, _fp16(p)  load LANES numbers and widen them to 32 bits. By intrinsics, because compilers would convert vectors of
//                                 bytes element by element.
//   store_i8(p, x)                stores LANES numbers that fit a byte
//   fp16_to_float(x)              converts the float16 in the lower 16 bits of each lane to float32
//   broadcast_fp16(bits)          broadcasts a float16, as float32
//   lookup16(table, x)            looks up each byte of x (ivec or int32x8), at most 15, in a table of 16 bytes
//   spread_bits(x)                moves bits 0 to 3 of a lane to bit 4 of its four bytes; all other bits of the result are 0
//   load_quarters(rows, stride)   loads 16 bytes from each of LANES / 4 rows: 0, 4, 8 and 12 with AVX-512, 0 and 4 with AVX2, 0 with NEON
//   dot4_accumulate(sum, w, x4)   in each lane, adds to `sum` the dot product of 4 codes w (0 to MAX_CODE) with the 4 activations at x4
//                                 (-127 to 127). Subtracts 128 from codes, by flipping their highest bit, if MAX_CODE > DOT4_MAX_CODE.
// Without VNNI, avx2.h and avx512.h have:
//   pair_products(w, x)           in each 16 bits, the sum of two products of a code and an activation, the bytes of w and x
//   sum_pairs(pairs, factors)     in each lane, the sum of two products of 16 bits and 16 bits
// neon_dot.h instead of dot4_accumulate, and pair_products.h (HAVE_DOT_COLUMNS):
//   dot_columns(w, first, x, sums)  adds to sums (R) the dot products of COUNT columns of codes w(i), from `first` on, with R rows of a
//                                 sub-block's activations
//   dot_scaled_columns(w, first, x, scales, sums)  as dot_columns(), times a scale, whose 16 bits are in both halves of a lane
//   dot_halves(sum, a, b)         in each lane, adds to `sum` the dot product of the halves of a and of b, 16 bits each
//   ROW_RUN                       numbers of a row that lie side by side in these activations (matmul.h)
#pragma once

#include <cstdint>
#include <cstring>

typedef std::uint8_t byte;

constexpr int SUB_BLOCK = 32;  // weights of a row that share a scale, or two (quants.h)

// Vectors of 32 bytes on every instruction set, for a sub-block of a single row.
typedef std::int32_t int32x8 __attribute__((vector_size(32)));
typedef byte uint8x32 __attribute__((vector_size(32)));

// For functions that keep unpacked weights in registers, which a call would spill to memory.
#define ALWAYS_INLINE __attribute__((always_inline))

// Loops over arrays of vectors must be unrolled, or the compiler keeps the arrays in memory, not in registers.
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

#if defined(__AVX512F__)
#include "avx512.h"
#elif defined(__AVX2__)
#include "avx2.h"
#else
#include "neon.h"
#endif

constexpr int LANES = sizeof(vec) / sizeof(float);

#if defined(__AVX2__) && !defined(__AVXVNNI__) && !defined(__AVX512VNNI__)
#include "pair_products.h"
#else
constexpr bool HAVE_SCALED_COLUMNS = false;

// What code names that HAVE_SCALED_COLUMNS keeps from running.
template <int MAX_CODE, int R, int COUNT, typename W>
void dot_scaled_columns(const W &w, int first, const std::int8_t *x, ivec scales, ivec *sums);
ivec dot_halves(ivec sum, ivec a, std::int32_t b);

#if defined(__ARM_FEATURE_DOTPROD)
#include "neon_dot.h"
#else
constexpr bool HAVE_DOT_COLUMNS = false;
constexpr int ROW_RUN = SUB_BLOCK;

// What code names that HAVE_DOT_COLUMNS keeps from running.
template <int MAX_CODE, int R, int COUNT, typename W> void dot_columns(const W &w, int first, const std::int8_t *x, ivec *sums);
#endif
#endif
