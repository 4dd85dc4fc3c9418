// The primitives of isa.h with NEON: 4 lanes.
#include <arm_neon.h>

typedef float vec __attribute__((vector_size(16)));
typedef std::int32_t ivec __attribute__((vector_size(16)));
constexpr int MAX_SUMS = 24;

static inline vec fmadd(vec a, vec b, vec c) { return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }

static inline uint8x8_t load_4_bytes(const void *p) {
  std::uint32_t bytes;
  std::memcpy(&bytes, p, 4);
  return vcreate_u8(bytes);
}
static inline uint16x4_t load_4_shorts(const void *p) { return vreinterpret_u16_u8(vld1_u8(static_cast<const byte *>(p))); }
static inline ivec load_u8(const void *p) { return (ivec)vmovl_u16(vget_low_u16(vmovl_u8(load_4_bytes(p)))); }
static inline ivec load_i8(const void *p) { return (ivec)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(load_4_bytes(p))))); }
static inline ivec load_u16(const void *p) { return (ivec)vmovl_u16(load_4_shorts(p)); }
static inline vec load_fp16(const void *p) { return (vec)vcvt_f32_f16(vreinterpret_f16_u16(load_4_shorts(p))); }
static inline void store_i8(std::int8_t *p, const ivec &x) {
  for (int l = 0; l < 4; l++) p[l] = static_cast<std::int8_t>(x[l]);
}

ALWAYS_INLINE inline vec fp16_to_float(ivec x) { return (vec)vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32((uint32x4_t)x))); }
ALWAYS_INLINE inline vec broadcast_fp16(std::uint16_t bits) { return (vec)vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(bits))); }

static inline ivec lookup16(const byte *table, ivec x) { return (ivec)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)x); }
static inline int32x8 lookup16(const byte *table, int32x8 x) {
  ivec halves[2];
  std::memcpy(halves, &x, sizeof x);
  for (ivec &part : halves) part = lookup16(table, part);
  std::memcpy(&x, halves, sizeof x);
  return x;
}

ALWAYS_INLINE inline ivec spread_bits(ivec x) {
  return (x & 15) * 0x02040810 & 0x10101010;  // the product copies bit b to bit 4 of byte b, the mask drops all others
}

ALWAYS_INLINE inline vec load_quarters(const byte *rows, std::int64_t) { return (vec)vld1q_u8(rows); }

#if !defined(__ARM_FEATURE_DOTPROD)  // else neon_dot.h
constexpr int DOT4_MAX_CODE = 127;  // codes are multiplied as int8

template <int MAX_CODE> static inline ivec dot4_accumulate(ivec sum, ivec w, const std::int8_t *x4) {
  std::int32_t x4_bits;
  std::memcpy(&x4_bits, x4, sizeof x4_bits);
  int8x16_t a = (int8x16_t)w;
  const int8x16_t b = vreinterpretq_s8_s32(vdupq_n_s32(x4_bits));
  if constexpr (MAX_CODE > DOT4_MAX_CODE) a = veorq_s8(a, vdupq_n_s8(-128));
  const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)));
  return sum + (ivec)vpaddq_s32(low, vpaddlq_s16(vmull_high_s8(a, b)));
}
#endif
