// Operations on SIMD vectors of floats that are written once for all instruction sets, and memory for them.
#pragma once

#include "isa/isa.h"
#include <cstdlib>
#include <new>
#include <sys/mman.h>
#include <type_traits>
#include <utility>

typedef float unaligned_vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

// A buffer that is reused from call to call, so that a decoding step allocates nothing. Large buffers use huge pages where possible,
// and shrink after SMALL_REQUESTS requests for less than a quarter, so that one long prompt does not keep its memory for good.
// Round sizes of its parts up by round_up_to_line(), so that loads do not straddle cache lines.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }

  float *get(std::int64_t size) {
    small_requests_ = size < size_ / 4 ? small_requests_ + 1 : 0;
    if (size > size_ || (small_requests_ >= SMALL_REQUESTS && size_ * sizeof(float) > LARGE)) {
      std::free(data_);
      data_ = nullptr;
      size_ = small_requests_ = 0;
      const std::int64_t bytes = round_up_to_line(size) * sizeof(float), page = bytes < LARGE ? 64 : LARGE;
      const std::int64_t rounded = (bytes + page - 1) / page * page;
      data_ = static_cast<float *>(std::aligned_alloc(page, rounded));
      if (!data_) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
      if (page == LARGE) madvise(data_, rounded, MADV_HUGEPAGE);
#endif
      size_ = size;
    }
    return data_;
  }

  static std::int64_t round_up_to_line(std::int64_t floats) { return (floats + 15) / 16 * 16; }

 private:
  static constexpr std::int64_t LARGE = 2 << 20;  // bytes of a huge page
  static constexpr std::int64_t SMALL_REQUESTS = 4096;  // some forwards of a model

  float *data_ = nullptr;
  std::int64_t size_ = 0, small_requests_ = 0;
};

// An address to prefetch from. A number, because it may lie past the end of an array, where a pointer would be undefined.
typedef std::uintptr_t Address;

inline Address address_of(const void *p) { return reinterpret_cast<Address>(p); }

// LOCALITY: 3 for all caches, 2 for all but the first. Always inlined: GCC takes a function that only prefetches for a pure one without a
// result, and drops its calls.
template <int LOCALITY = 3>
__attribute__((always_inline)) inline void prefetch(Address address) { __builtin_prefetch(reinterpret_cast<const void *>(address), 0, LOCALITY); }

// Calls f with n, MIN <= n <= MAX, as a compile-time constant. Stops the process for any other n, which is a bug of a caller.
template <int MAX, int MIN = 1, typename F> inline void dispatch(std::int64_t n, const F &f) {
  if (n == MAX) return f(std::integral_constant<int, MAX>{});
  if constexpr (MAX > MIN) {
    dispatch<MAX - 1, MIN>(n, f);
  } else {
    __builtin_trap();
  }
}

// Calls f with 0, ..., N - 1 as compile-time constants.
template <int N, typename F> inline void static_for(const F &f) {
  if constexpr (N > 1) static_for<N - 1>(f);
  f(std::integral_constant<int, N - 1>{});
}

static inline vec load(const float *p) { return *reinterpret_cast<const unaligned_vec *>(p); }

static inline void store(float *p, vec x) { *reinterpret_cast<unaligned_vec *>(p) = x; }

// Loads n <= LANES floats; the other lanes are 0.
static inline vec load_partial(const float *p, std::int64_t n) {
  vec x = {};
  std::memcpy(&x, p, sizeof(float) * n);
  return x;
}

static inline void store_partial(float *p, vec x, std::int64_t n) { std::memcpy(p, &x, sizeof(float) * n); }

// Broadcasts x by subtracting 0, for which compilers emit no instruction, because x - 0 is x for every x. 0 + x would change -0.
static inline vec broadcast(float x) { return x - vec{}; }
static inline ivec broadcast(std::int32_t x) { return x - ivec{}; }

static inline vec v_max(vec a, vec b) { return a > b ? a : b; }
static inline vec v_abs(vec x) { return x < 0 ? -x : x; }

// Fused multiply-add: a * b + c, rounded once; that of vectors is in isa/. Compilers must not fuse other expressions (-ffp-contract=off):
// they would do so in some places only, and a row's bits would depend on its tile.
static inline float fmadd(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// Returns lanes I of a and b, where numbers below LANES mean lanes of a, and the others lanes of b.
template <int... I> static inline vec shuffle(vec a, vec b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, I...);
#else
  return __builtin_shuffle(a, b, ivec{I...});
#endif
}

struct Add {
  static inline vec apply(vec a, vec b) { return a + b; }
};

struct Max {
  static inline vec apply(vec a, vec b) { return v_max(a, b); }
};

template <typename Op, int STEP, int... I>
static inline vec fold_pair(vec a, vec b, std::integer_sequence<int, I...>) {
  // Combines lanes that are STEP apart: of a in the lower half of the result, of b in the upper half. With 4 lanes and STEP = 2:
  // a0 a1 a2 a3, b0 b1 b2 b3 --> a0+a2 a1+a3 b0+b2 b1+b3.
  constexpr int HALF = LANES / 2;
  return Op::apply(shuffle<(I / HALF * LANES + I % HALF / STEP * 2 * STEP + I % STEP)...>(a, b),
                   shuffle<(I / HALF * LANES + I % HALF / STEP * 2 * STEP + I % STEP + STEP)...>(a, b));
}

// Reduces each of N <= LANES vectors to its sum (or maximum), which is lane i of the result for v[i]. Folds vectors in pairs, which takes
// fewer than three operations for each vector.
template <typename Op, int N, int STEP = LANES / 2> static inline vec reduce_lanes(const vec *v) {
  static_assert(0 < N && N <= 2 * STEP);
  constexpr int PAIRS = (N + 1) / 2;
  vec folded[PAIRS];
  UNROLL for (int i = 0; i < PAIRS; i++) {
    folded[i] = fold_pair<Op, STEP>(v[2 * i], 2 * i + 1 < N ? v[2 * i + 1] : vec{}, std::make_integer_sequence<int, LANES>{});
  }
  if constexpr (STEP == 1) {
    return folded[0];
  } else {
    return reduce_lanes<Op, PAIRS, STEP / 2>(folded);
  }
}

// A sum in sixteen parts, however many lanes a vector has, so that every instruction set adds up in one order.
struct Sum16 {
  static constexpr int VECTORS = 16 / LANES;
  vec parts[VECTORS] = {};

  // Adds up parts until LANES are left.
  vec fold_to_vector() const {
    if constexpr (VECTORS == 4) return (parts[0] + parts[2]) + (parts[1] + parts[3]);
    if constexpr (VECTORS == 2) return parts[0] + parts[1];
    return parts[0];
  }
};

// Returns the sum of vector v[i] in lane i.
template <int N> static inline vec horizontal_sums(const vec *v) { return reduce_lanes<Add, N>(v); }

template <int... I>
static inline void zip_lanes(vec a, vec b, vec *out, std::integer_sequence<int, I...>) {
  // Interleaves a and b: a0 b0 a1 b1 ..., in two vectors.
  out[0] = shuffle<(I / 2 + I % 2 * LANES)...>(a, b);
  out[1] = shuffle<(I / 2 + I % 2 * LANES + LANES / 2)...>(a, b);
}

// Transposes LANES x LANES floats: zips vectors i and i + LANES / 2, log2(LANES) times.
static inline void transpose(vec *a) {
  vec b[LANES];
  for (int step = 1; step < LANES; step *= 2) {
    UNROLL for (int i = 0; i < LANES / 2; i++) zip_lanes(a[i], a[i + LANES / 2], b + 2 * i, std::make_integer_sequence<int, LANES>{});
    UNROLL for (int i = 0; i < LANES; i++) a[i] = b[i];
  }
}

// Returns e^x for x <= 0, with an absolute error below 2^-22; 0 for x below -87. NaN stays NaN.
static inline vec v_exp(vec x) {
  const vec lowest = broadcast(-87.0f);
  const vec shift = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, which is then in the mantissa's lowest bits
  const vec y = (lowest > x ? lowest : x) * 1.44269504088896341f;  // log2(e): e^x = 2^y = 2^n * 2^f, where n is an integer
  const vec t = y + shift;
  const vec f = y - (t - shift);
  vec p = broadcast(1.326472707e-03f);  // p = 2^f, by a polynomial for f from -0.5 to 0.5
  p = fmadd(p, f, broadcast(9.671512649e-03f));
  p = fmadd(p, f, broadcast(5.550733744e-02f));
  p = fmadd(p, f, broadcast(2.402224209e-01f));
  p = fmadd(p, f, broadcast(6.931469776e-01f));
  p = fmadd(p, f, broadcast(1.0f));
  ivec rounded, bits;
  std::memcpy(&rounded, &t, sizeof rounded);
  std::memcpy(&bits, &p, sizeof bits);
  bits += rounded << 23;  // times 2^n
  std::memcpy(&p, &bits, sizeof p);
  // Exactly 0, so that a masked key changes no bit of a row's sums.
  return x < lowest ? vec{} : p;
}

// Returns tanh(x), within about an ulp. NaN stays NaN.
static inline vec v_tanh(vec x) {
  // tanh(x) = (1 - e) / (1 + e) with e = e^(-2x), but near 0, 1 - e would lose bits: below 0.625 the result is x + x^3 P(x^2), where the
  // polynomial P is fitted to the relative error.
  const vec z = x * x, size = v_abs(x);
  vec p = broadcast(-5.7049873e-03f);
  p = fmadd(p, z, broadcast(2.0639088e-02f));
  p = fmadd(p, z, broadcast(-5.3739715e-02f));
  p = fmadd(p, z, broadcast(1.3331442e-01f));
  p = fmadd(p, z, broadcast(-3.3333280e-01f));
  const vec e = v_exp(-2.0f * size), far = (1.0f - e) / (1.0f + e);
  return size < 0.625f ? fmadd(x * z, p, x) : x < 0 ? -far : far;
}
