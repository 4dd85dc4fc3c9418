// Vectors of floats in GNU C++'s own notation, which clang knows too: 16 lanes with AVX-512, 8 with AVX2, 4 with NEON.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <sys/mman.h>
#include <type_traits>
#include <utility>
#if defined(__AVX2__)
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int TILE = 24;  // sums that stay in registers, beside what they are made of
#elif defined(__AVX2__)
constexpr int LANES = 8;
constexpr int TILE = 12;
#else
constexpr int LANES = 4;
constexpr int TILE = 24;
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef std::int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef float unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

// Memory that is kept from call to call, so that a round allocates nothing; much of it in large pages where Linux has some. Loads do
// not straddle cache lines if each part of it has whole_lines().
class Scratch {
 public:
  ~Scratch() { std::free(kept_); }

  float *of(std::int64_t size) {
    if (size > size_) {
      std::free(kept_);
      size_ = 0;
      const std::int64_t bytes = whole_lines(size) * sizeof(float), page = bytes < LARGE ? 64 : LARGE;
      const std::int64_t whole = (bytes + page - 1) / page * page;
      kept_ = static_cast<float *>(std::aligned_alloc(page, whole));
      if (!kept_) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
      if (page == LARGE) madvise(kept_, whole, MADV_HUGEPAGE);
#endif
      size_ = size;
    }
    return kept_;
  }

  static std::int64_t whole_lines(std::int64_t floats) { return (floats + 15) / 16 * 16; }

 private:
  static constexpr std::int64_t LARGE = 2 << 20;  // bytes of a large page

  float *kept_ = nullptr;
  std::int64_t size_ = 0;
};

// what(N) for n as a constant, LEAST at least and MOST at most.
template <int MOST, int LEAST = 1, typename What>
inline void with_number(std::int64_t n, const What &what) {
  if (n == MOST) return what(std::integral_constant<int, MOST>{});
  if constexpr (MOST > LEAST) with_number<MOST - 1, LEAST>(n, what);
}

// what(0), ..., what(N - 1), as constants.
template <int N, typename What>
inline void with_each(const What &what) {
  if constexpr (N > 1) with_each<N - 1>(what);
  what(std::integral_constant<int, N - 1>{});
}

// Loops over registers must be unrolled, or the compiler keeps the registers in memory.
#if defined(__clang__)
#define UNROLLED _Pragma("unroll")
#else
#define UNROLLED _Pragma("GCC unroll 32")
#endif

static inline vec load(const float *p) { return *reinterpret_cast<const unaligned *>(p); }

static inline void store(float *p, vec x) { *reinterpret_cast<unaligned *>(p) = x; }

// The first n <= LANES floats, zeros behind them.
static inline vec load_some(const float *p, std::int64_t n) {
  vec x = {};
  std::memcpy(&x, p, sizeof(float) * n);
  return x;
}

static inline void store_some(float *p, vec x, std::int64_t n) { std::memcpy(p, &x, sizeof(float) * n); }

// x - 0 is x for every x, so nothing is computed; 0 + x would change -0.
static inline vec every(float x) { return x - vec{}; }
static inline ivec every(std::int32_t x) { return x - ivec{}; }

static inline vec larger(vec a, vec b) { return a > b ? a : b; }
static inline vec magnitude(vec x) { return x < 0 ? -x : x; }

// a * b + c, rounded once, in the same way for single numbers and vectors. Compilers must not fuse by themselves
// (-ffp-contract=off): they would do it in some places only, and a row's sum would depend on its tile.
static inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#if defined(__AVX512F__)
static inline vec fused(vec a, vec b, vec c) { return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#elif defined(__AVX2__)
static inline vec fused(vec a, vec b, vec c) { return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#else
static inline vec fused(vec a, vec b, vec c) { return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#endif

// The lanes of a and b, numbered one after the other, in the order I.
template <int... I>
static inline vec shuffled(vec a, vec b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, I...);
#else
  return __builtin_shuffle(a, b, ivec{I...});
#endif
}

struct Add {
  static inline vec of(vec a, vec b) { return a + b; }
};

struct Larger {
  static inline vec of(vec a, vec b) { return larger(a, b); }
};

template <typename Op, int STEP, int... I>
static inline vec fold(vec a, vec b, std::integer_sequence<int, I...>) {
  // Lane i of the result joins two lanes, STEP apart, of a (the lower half of the lanes) or b (the upper half).
  constexpr int HALF = LANES / 2;
  return Op::of(shuffled<(I / HALF * LANES + I % HALF / STEP * 2 * STEP + I % STEP)...>(a, b),
                shuffled<(I / HALF * LANES + I % HALF / STEP * 2 * STEP + I % STEP + STEP)...>(a, b));
}

// Lane i of the result is the sum (the maximum) of v[i]'s lanes, for N <= LANES vectors. They are folded together in
// pairs, which takes fewer than three operations a vector.
template <typename Op, int N, int STEP = LANES / 2>
static inline vec across(const vec *v) {
  static_assert(0 < N && N <= 2 * STEP);
  constexpr int PAIRS = (N + 1) / 2;
  vec folded[PAIRS];
  UNROLLED for (int i = 0; i < PAIRS; i++) {
    folded[i] = fold<Op, STEP>(v[2 * i], 2 * i + 1 < N ? v[2 * i + 1] : vec{}, std::make_integer_sequence<int, LANES>{});
  }
  if constexpr (STEP == 1) {
    return folded[0];
  } else {
    return across<Op, PAIRS, STEP / 2>(folded);
  }
}

// Sixteen sums side by side, however many lanes a vector has, so that what they add up to is the same everywhere.
struct Sixteen {
  static constexpr int VECTORS = 16 / LANES;
  vec part[VECTORS] = {};

  // Lanes whose numbers differ by LANES or more added up: what is left is LANES wide.
  vec folded() const {
    if constexpr (VECTORS == 4) return (part[0] + part[2]) + (part[1] + part[3]);
    if constexpr (VECTORS == 2) return part[0] + part[1];
    return part[0];
  }
};

template <int N>
static inline vec sums(const vec *v) {
  return across<Add, N>(v);
}

template <int... I>
static inline void shuffled_pair(vec a, vec b, vec *out, std::integer_sequence<int, I...>) {
  // a0 b0 a1 b1 ..., and its other half.
  out[0] = shuffled<(I / 2 + I % 2 * LANES)...>(a, b);
  out[1] = shuffled<(I / 2 + I % 2 * LANES + LANES / 2)...>(a, b);
}

// LANES x LANES numbers, transposed: a perfect shuffle for every bit of a lane's number.
static inline void transpose(vec *a) {
  vec b[LANES];
  for (int turn = 1; turn < LANES; turn *= 2) {
    UNROLLED for (int i = 0; i < LANES / 2; i++) {
      shuffled_pair(a[i], a[i + LANES / 2], b + 2 * i, std::make_integer_sequence<int, LANES>{});
    }
    UNROLLED for (int i = 0; i < LANES; i++) a[i] = b[i];
  }
}

// e^x for x <= 0, within 2^-22 of the largest value that a softmax's weights take; 0 below -87. NaN stays.
static inline vec exponential(vec x) {
  const vec lowest = every(-87.0f);
  const vec shift = every(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number, kept in the lowest bits
  const vec y = (lowest > x ? lowest : x) * 1.44269504088896341f;
  const vec t = y + shift;
  const vec f = y - (t - shift);
  vec p = every(1.326472707e-03f);
  p = fused(p, f, every(9.671512649e-03f));
  p = fused(p, f, every(5.550733744e-02f));
  p = fused(p, f, every(2.402224209e-01f));
  p = fused(p, f, every(6.931469776e-01f));
  p = fused(p, f, every(1.0f));
  ivec whole, bits;
  std::memcpy(&whole, &t, sizeof whole);
  std::memcpy(&bits, &p, sizeof bits);
  bits += whole << 23;  // times 2^n
  std::memcpy(&p, &bits, sizeof p);
  // Exactly 0: a key that a row does not see must not change a bit of the row's sums.
  return x < lowest ? vec{} : p;
}

// tanh(x), within about an ulp. NaN stays.
static inline vec hyperbolic_tangent(vec x) {
  // Near 0 the quotient would lose digits: x + x^3 P(x^2) there, P fitted for the least relative error up to 0.625.
  const vec z = x * x, size = magnitude(x);
  vec p = every(-5.7049873e-03f);
  p = fused(p, z, every(2.0639088e-02f));
  p = fused(p, z, every(-5.3739715e-02f));
  p = fused(p, z, every(1.3331442e-01f));
  p = fused(p, z, every(-3.3333280e-01f));
  const vec e = exponential(-2.0f * size), far = (1.0f - e) / (1.0f + e);
  return size < 0.625f ? fused(x * z, p, x) : x < 0 ? -far : far;
}
