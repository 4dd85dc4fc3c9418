// y = x W^T + b in int8 arithmetic: integer products of stored weights and rounded rows of x.
//
// LANES outputs are computed side by side (formats.h). Blocks are unpacked to bytes in registers, once for up to TOGETHER
// rows. Each piece of 32 weights is multiplied with these rows there: eight products of four bytes in each lane, one
// conversion, and the block's scales. With more rows bytes are unpacked to memory first: those of some hundred outputs for
// vectors, a few of LANES outputs for tiles (tiles.h), where the processor has some. In all cases a row's result is computed by
// the same operations in the same order, or by others whose results are exact.
#include "outputs.h"
#include "products.h"
#include "threads.h"
#include "tiles.h"

#include <algorithm>
#include <type_traits>

namespace {

constexpr int64_t MANY = 32;          // rows above which weights are unpacked to memory first
constexpr int64_t CACHED = 384 << 10; // bytes of unpacked weights for many rows
constexpr int64_t TILED = 9;          // rows for which tiles are faster

// Sum + the products of four bytes of w with four of x in each lane. Bytes of w are unsigned and MOST at most; those of x
// are from -127 to 127.
#if !defined(__AVX512VNNI__)
// Some processors have no instruction for unsigned by signed bytes without overflow. There large bytes are made signed: the sums
// are then too small by 128 * x, which start() corrects.
template <int MOST>
constexpr bool SIGNED = MOST > 127;
#else
template <int MOST>
constexpr bool SIGNED = false;
#endif

template <int MOST>
inline ivec dot(ivec sum, ivec w, const std::int8_t *four) {
#if defined(__AVX512VNNI__)
  // Compilers would load and broadcast the four numbers with a separate instruction, which takes a third longer.
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*reinterpret_cast<const std::int32_t *>(four)));
  return sum;
#else
  std::int32_t number;
  std::memcpy(&number, four, sizeof number);
  const ivec x = every(number);
#if defined(__AVX512BW__)
  __m512i a = (__m512i)w, b = (__m512i)x;
  if constexpr (SIGNED<MOST>) {
    a = _mm512_xor_si512(a, _mm512_set1_epi8(-128));
    b = _mm512_mask_sub_epi8(b, _mm512_movepi8_mask(a), _mm512_setzero_si512(), b);
    a = _mm512_abs_epi8(a);
  }
  return sum + (ivec)_mm512_madd_epi16(_mm512_maddubs_epi16(a, b), _mm512_set1_epi16(1));
#elif defined(__AVX2__)
  __m256i a = (__m256i)w, b = (__m256i)x;
  if constexpr (SIGNED<MOST>) {
    a = _mm256_xor_si256(a, _mm256_set1_epi8(-128));
    b = _mm256_sign_epi8(b, a);
    a = _mm256_abs_epi8(a);
  }
  return sum + (ivec)_mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1));
#else
  int8x16_t a = (int8x16_t)w, b = (int8x16_t)x;
  if constexpr (SIGNED<MOST>) a = veorq_s8(a, vdupq_n_s8(-128));
  const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)));
  return sum + (ivec)vpaddq_s32(low, vpaddlq_s16(vmull_high_s8(a, b)));
#endif
#endif
}

// The initial value of sums of products with w's bytes, so that they end as sums with bytes minus ZERO. less: sum of x's numbers.
template <typename F>
INLINED inline ivec start(std::int32_t less) {
  constexpr int OFF = F::ZERO - (SIGNED<F::MOST> ? 128 : 0);
  if constexpr (OFF == 0) return ivec{};
  if constexpr (OFF > 0 && (OFF & (OFF - 1)) == 0) return every(less) << __builtin_ctz(OFF);  // faster than the product
  return every(less) * OFF;
}

// What sums of products are multiplied with before they meet a float: a piece's whole number, as a float where that is exact.
template <typename F>
using Number = std::conditional_t<F::WIDE, ivec, vec>;

template <typename F, typename S>
INLINED inline Number<F> number_of(const S &scale) {
  if constexpr (F::WIDE) return scale.number;
  if constexpr (F::PIECES > 1 && !F::WIDE) return floats(scale.number);
  if constexpr (F::PIECES == 1) return scale;
}

INLINED inline vec whole_of(const Scale &scale) { return scale.whole; }
INLINED inline vec whole_of(vec scale) { return scale; }  // not used

INLINED inline vec times(ivec products, vec number, vec sum) { return fused(floats(products), number, sum); }
INLINED inline ivec times(ivec products, ivec number, ivec sum) { return products * number + sum; }

// y (R) += R rows of x times a piece. n, b: the piece's numbers and blocks of x, row after row. sums (R): those of the pieces that
// are rounded together, below 2^24 where they are floats, and so exact; added to y with the last piece.
template <typename F, int R, typename W>
INLINED inline void meet(const W &w, const Number<F> *number, vec whole, const vec *least, bool last, const std::int8_t *n,
                         const Int8Rows::Block *b, Number<F> *sums, vec *y) {
  constexpr int EACH = COLUMNS_OF_PIECE / F::SCALES;
  UNROLLED for (int s = 0; s < F::SCALES; s++) {
    ivec products[R];
    UNROLLED for (int r = 0; r < R; r++) products[r] = start<F>(F::SCALES == 1 ? b[r].less : b[r].half_less[s]);
    UNROLLED for (int i = s * EACH; i < (s + 1) * EACH; i++) {
      const ivec own = w(i);
      UNROLLED for (int r = 0; r < R; r++) {
        products[r] = dot<F::MOST>(products[r], own, n + r * PIECE + 4 * i);
      }
    }
    UNROLLED for (int r = 0; r < R; r++) {
      if constexpr (F::LEAST) y[r] = fused(every(F::SCALES == 1 ? b[r].sum : b[r].half[s]), least[s], y[r]);
      if constexpr (F::PIECES == 1) {
        y[r] = fused(every(b[r].scale), floats(products[r]) * number[s], y[r]);
      } else {
        sums[r] = times(products[r], number[s], sums[r]);
      }
    }
  }
  if (F::PIECES == 1 || !last) return;
  UNROLLED for (int r = 0; r < R; r++) {
    y[r] = fused(every(b[r].scale), __builtin_convertvector(sums[r], vec) * whole, y[r]);
    sums[r] = Number<F>{};
  }
}

template <int R = Int8Rows::TOGETHER, typename What>
inline void with_width(int64_t width, const What &what) {
  if constexpr (R == 5 || R == 7) return with_width<R - 1>(width, what);
  if (width == R) return what(std::integral_constant<int, R>{});
  if constexpr (R > 1) with_width<R - 1>(width, what);
}

// Whether it is the last of pieces that are rounded together.
template <typename F>
INLINED inline bool is_last(int piece) { return piece % F::PIECES == F::PIECES - 1; }

// Few rows, those of one group: weights are unpacked in registers. fetch: prefetch the next outputs.
template <typename F, int R>
void few(const Int8Rows &x, int64_t row, const Matrix &m, const Outputs &outputs, Woven in, bool fetch) {
  constexpr int64_t EACH = F::BYTES * LANES * PIECE / F::WEIGHTS;  // bytes of a piece
  // A second line is asked for as far ahead of the first, so that the processor's own prefetching begins earlier. With more
  // rows, an Intel Xeon was faster where it is asked for less often, in the next page.
  constexpr int64_t AHEAD = R <= 2 ? 2048 : 4096, EVERY = R <= 2 ? 64 : 512;
  vec y[R] = {};
  Number<F> sums[R] = {};
  const int64_t place = x.place(row, 0);
  const std::int8_t *numbers = x.numbers + place * PIECE;
  const Int8Rows::Block *ends = x.blocks + place;
  const byte *next = outputs.first(m) + LANES * m.w_row, *wanted = next;
  for (int64_t i = 0; i < x.size; i += F::WEIGHTS, in = in.at(F::BYTES)) {
    F::block(in, [&](int piece, const auto &w, const auto *scale, const vec *least) INLINED {
      // A few cache lines at a time: many at once would delay the ones that are needed now.
      if (fetch) {
        for (wanted += EACH; next < wanted; next += 64) {
          __builtin_prefetch(next, 0, 2);
          if (reinterpret_cast<std::uintptr_t>(next) % EVERY < 64) __builtin_prefetch(next + AHEAD, 0, 2);
        }
      }
      Number<F> number[F::SCALES];
      UNROLLED for (int s = 0; s < F::SCALES; s++) number[s] = number_of<F>(scale[s]);
      meet<F, R>([&](int i) { return listed<F>(w(i)); }, number, whole_of(*scale), least, is_last<F>(piece),
                 numbers + piece * R * PIECE, ends + piece * R, sums, y);
    });
    numbers += F::WEIGHTS * R;
    ends += F::WEIGHTS / PIECE * R;
  }
  const int64_t count = std::min(Int8Rows::TOGETHER, x.rows - row);
  for (int64_t r = 0; r < count; r++) outputs.finish(m, row + r, y[r]);
}

template <typename F>
struct Piece {
  ivec w[COLUMNS_OF_PIECE];
  Number<F> number[F::SCALES];
  vec whole[F::PIECES > 1], least[F::LEAST ? F::SCALES : 0];
};

// All blocks of LANES rows, piece by piece in the order of block().
template <typename F>
void dequantize_kv(Woven in, int64_t size, Piece<F> *to) {
  for (int64_t i = 0; i < size; i += F::WEIGHTS, in = in.at(F::BYTES)) {
    F::block(in, [&](int, const auto &w, const auto *scale, const vec *least) INLINED {
      UNROLLED for (int i = 0; i < COLUMNS_OF_PIECE; i++) to->w[i] = listed<F>(w(i));
      UNROLLED for (int s = 0; s < F::SCALES; s++) {
        to->number[s] = number_of<F>(scale[s]);
        if constexpr (F::LEAST) to->least[s] = least[s];
      }
      if constexpr (F::PIECES > 1) to->whole[0] = scale[0].whole;
      to++;
    });
  }
}

template <typename F, int R>
void multiply(const Piece<F> *p, const Int8Rows &x, int64_t row, vec *y) {
  constexpr int PIECES = F::WEIGHTS / PIECE;
  vec found[R] = {};
  Number<F> sums[R] = {};
  const int64_t place = x.place(row, 0);
  const std::int8_t *numbers = x.numbers + place * PIECE;
  const Int8Rows::Block *ends = x.blocks + place;
  for (int64_t i = 0; i < x.size; i += F::WEIGHTS, numbers += F::WEIGHTS * R, ends += PIECES * R) {
    for (int k = 0; k < PIECES; k++, p++) {
      const int piece = F::nth(k);
      meet<F, R>([&](int c) { return p->w[c]; }, p->number, F::PIECES > 1 ? p->whole[0] : vec{}, p->least, is_last<F>(piece),
                 numbers + piece * R * PIECE, ends + piece * R, sums, found);
    }
  }
  UNROLLED for (int r = 0; r < R; r++) y[r] = found[r];
}

// Many rows: all weights of some outputs are unpacked first.
template <typename F>
void many(const Int8Rows &x, const Matrix &m, int64_t from, int64_t to) {
  static thread_local Scratch scratch, copies;
  const int64_t each = x.size / PIECE, floats_each = each * sizeof(Piece<F>) / 4;
  const int64_t most = std::max<int64_t>(1, CACHED / (4 * floats_each));
  auto *pieces = reinterpret_cast<Piece<F> *>(scratch.of(std::min(most, (to - from + LANES - 1) / LANES) * floats_each));
  for (int64_t first = from; first < to; first += most * LANES) {
    const int64_t end = std::min(to, first + most * LANES);
    for (int64_t out = first, i = 0; out < end; out += LANES, i++) {
      dequantize_kv<F>(Outputs(m, out).woven<F>(m, 0, x.size, copies), x.size, pieces + i * each);
    }
    for (int64_t row = 0; row < x.rows; row += Int8Rows::TOGETHER) {
      const int64_t rows = std::min(Int8Rows::TOGETHER, x.rows - row);
      with_width(x.width(row), [&](auto width) {
        for (int64_t out = first, i = 0; out < end; out += LANES, i++) {
          vec y[width.value];
          multiply<F, width.value>(pieces + i * each, x, row, y);
          const Outputs outputs(m, out);
          for (int64_t r = 0; r < rows; r++) outputs.finish(m, row + r, y[r]);
        }
      });
    }
  }
}

#if defined(LONGDRAFT_AMX)
constexpr int64_t TILED_AT_A_TIME = 4;  // of LANES outputs, 18 KB: they stay in the first-level cache while rows pass
constexpr int64_t TILED_ROWS = 512;     // their numbers and sums stay in the second-level cache while outputs pass

// The pieces of LANES outputs that are rounded together: weights times their scales' whole numbers, in two parts (tiles.h), four of
// each output in a lane. 64 of an output are a tile.
template <typename F>
struct Tiled {
  typedef tiles::Products<F::ZERO> Products;

  ivec low[2][2 * COLUMNS_OF_PIECE], high[2][2 * COLUMNS_OF_PIECE];
  vec whole, least[F::LEAST ? F::PIECES : 0];
};

// next: the bytes of the next outputs, to be prefetched.
template <typename F>
void unpack_tiles(Woven in, int64_t size, const byte *next, Tiled<F> *to) {
  constexpr int64_t EACH = F::BYTES * LANES * PIECE / F::WEIGHTS;  // bytes of a piece
  const byte *wanted = next;
  for (int64_t i = 0; i < size; i += F::WEIGHTS, in = in.at(F::BYTES), to += F::WEIGHTS / PIECE / F::PIECES) {
    F::block(in, [&](int piece, const auto &w, const auto *scale, const vec *least) INLINED {
      for (wanted += EACH; next < wanted; next += 64) __builtin_prefetch(next, 0, 2);
      Tiled<F> &own = to[piece / F::PIECES];
      const int part = piece % F::PIECES, column = part % 2 * COLUMNS_OF_PIECE;
      UNROLLED for (int s = 0; s < F::SCALES; s++) {
        constexpr int EACH = COLUMNS_OF_PIECE / F::SCALES;
        const typename Tiled<F>::Products products(scale[s].number);
        UNROLLED for (int i = s * EACH; i < (s + 1) * EACH; i++) {
          products.of(listed<F>(w(i)), own.low[part / 2][column + i], own.high[part / 2][column + i]);
        }
        if constexpr (F::LEAST) own.least[part] = least[s];
      }
      own.whole = scale[0].whole;
    });
  }
}

// What a tile's rows' sums of one Tiled add to y.
template <int LINES, typename F>
INLINED inline void add_sums(const Tiled<F> &w, const std::int32_t *low, const std::int32_t *high, const Int8Rows::Four *x,
                             vec *y) {
  UNROLLED for (int r = 0; r < LINES; r++) {
    if constexpr (F::LEAST) {
      UNROLLED for (int p = 0; p < F::PIECES; p++) y[r] = fused(every(x[r].sums[p]), w.least[p], y[r]);
    }
    const ivec sum = tiles::load(low + r * LANES) + (tiles::load(high + r * LANES) << Tiled<F>::Products::SHIFT);
    y[r] = fused(every(x[r].scale), floats(sum) * w.whole, y[r]);
  }
}

// y (rows from `row` to `end`, LANES) += x's numbers from Tiled number `first` on times `count` of them, an even number. The sums of
// one are stored and added while the tiles of the next are multiplied.
template <int LINES, typename F>
void multiply_tiles(const Tiled<F> *w, int64_t first, int64_t count, const Int8Rows &x, int64_t row, int64_t end, float *y) {
  constexpr int64_t EACH = F::PIECES * PIECE;
  constexpr bool UNSIGNED = Tiled<F>::Products::UNSIGNED;
  alignas(64) std::int32_t low[LINES * LANES], high[LINES * LANES];
  vec own[LINES];
  const std::int8_t *numbers = x.numbers + row * x.size + first * EACH * LINES;
  const Int8Rows::Four *fours = x.fours + row * (x.size / EACH) + first * LINES, *before = nullptr;
  for (;; row += LINES, y += LINES * LANES, numbers += LINES * x.size, fours += LINES * (x.size / EACH)) {
    for (int64_t k = 0; k < count; k += 2) {
      if (row < end) tiles::multiply<0, LINES, UNSIGNED>(numbers + k * EACH * LINES, w[k].low[0], w[k].high[0]);
      if (before) {
        tiles::store<2>(low), tiles::store<3>(high);
        add_sums<LINES>(w[(k ? k : count) - 1], low, high, before, own);
      }
      if (k == 0) {
        if (before) UNROLLED for (int r = 0; r < LINES; r++) store(y + (r - LINES) * LANES, own[r]);
        if (row >= end) return;
        UNROLLED for (int r = 0; r < LINES; r++) own[r] = ::load(y + r * LANES);
      }
      tiles::multiply<2, LINES, UNSIGNED>(numbers + (k + 1) * EACH * LINES, w[k + 1].low[0], w[k + 1].high[0]);
      tiles::store<0>(low), tiles::store<1>(high);
      add_sums<LINES>(w[k], low, high, fours + k * LINES, own);
      before = fours + (k + 1) * LINES;
    }
  }
}

// Outputs [from, to) of many rows: a few weights of LANES outputs are unpacked at a time, and meet many rows there.
template <int LINES, typename F>
void tiled(const Int8Rows &x, const Matrix &m, int64_t from, int64_t to) {
  constexpr int64_t EACH = F::PIECES * PIECE;
  static thread_local Scratch of_sums, copies;
  alignas(64) Tiled<F> w[TILED_AT_A_TIME];
  const tiles::Shapes shapes(LINES);
  const int64_t all = x.size / EACH, vectors = (to - from + LANES - 1) / LANES;
  for (int64_t row = 0; row < x.rows; row += TILED_ROWS) {
    const int64_t end = std::min(x.rows, row + TILED_ROWS), size = (end - row + LINES - 1) / LINES * LINES * LANES;
    float *sums = of_sums.of(vectors * size);
    std::memset(sums, 0, vectors * size * sizeof(float));
    for (int64_t first = 0; first < all; first += TILED_AT_A_TIME) {
      const int64_t count = std::min(TILED_AT_A_TIME, all - first);
      for (int64_t v = 0; v < vectors; v++) {
        const Outputs outputs(m, from + v * LANES);
        const byte *next = outputs.first(m) + LANES * (m.w_row + first * EACH / F::WEIGHTS * F::BYTES);
        unpack_tiles<F>(outputs.woven<F>(m, first * EACH, count * EACH, copies), count * EACH, next, w);
        multiply_tiles<LINES>(w, first, count, x, row, end, sums + v * size);
      }
    }
    for (int64_t r = row; r < end; r++, sums += LANES) {
      for (int64_t v = 0; v < vectors; v++) Outputs(m, from + v * LANES).finish(m, r, load(sums + v * size));
    }
  }
}
#endif

template <typename F>
void outputs_of(const Int8Rows &x, const Matrix &m, int64_t from, int64_t to) {
#if defined(LONGDRAFT_AMX)
  if constexpr (F::PIECES > 1) {
    if (x.lines == 8) return tiled<8, F>(x, m, from, to);
    if (x.lines == 12) return tiled<12, F>(x, m, from, to);
    if (x.lines == 16) return tiled<16, F>(x, m, from, to);
  }
#endif
  if (x.rows > MANY) return many<F>(x, m, from, to);
  static thread_local Scratch copies;
  for (int64_t out = from; out < to; out += LANES) {
    const Outputs outputs(m, out);
    const Woven in = outputs.woven<F>(m, 0, x.size, copies);
    for (int64_t row = 0; row < x.rows; row += Int8Rows::TOGETHER) {
      with_width(x.width(row), [&](auto width) { few<F, width.value>(x, row, m, outputs, in, row == 0); });
    }
  }
}

}  // namespace

int64_t int8_pieces(Format format) {
  int64_t pieces = 1;
  in_blocks(format, [&](auto f) { pieces = decltype(f)::PIECES; });
  return pieces;
}

Int8Rows int8_rows(int64_t rows, int64_t size, int64_t pieces) {
  Int8Rows made{nullptr, nullptr, rows, size, pieces, 0};
  if (!TILES || pieces == 1 || rows < TILED) return made;
  // As many lines as rows need, in as few tiles.
  const int64_t turns = (rows + 15) / 16, most = (rows + turns - 1) / turns;
  made.lines = most <= 8 ? 8 : most <= 12 ? 12 : 16;
  return made;
}

void int8_outputs(const Int8Rows &x, const Matrix &m, int64_t from, int64_t to) {
  in_blocks(m.format, [&](auto f) { outputs_of<decltype(f)>(x, m, from, to); });
}

Code longdraft_weave(const void *w, Format format, int64_t outs, int64_t size, int64_t w_row, void *woven, int threads) {
  in_blocks(format, [=](auto f) {
    using F = decltype(f);
    share_out(threads, outs / LANES, [=](int64_t i) {
      const int64_t blocks = size / F::WEIGHTS;
      weave<F>(static_cast<const byte *>(w) + i * LANES * w_row, w_row, blocks,
               static_cast<byte *>(woven) + i * LANES * blocks * F::BYTES);
    });
  });
  return DONE;
}
