// dot_columns() of isa.h by vpmaddubsw, for processors without VNNI: products are summed up in 16 bits, as many as fit, before they are
// widened by vpmaddwd, which multiplies them with a scale as well (dot_scaled_columns()).

constexpr bool HAVE_DOT_COLUMNS = true, HAVE_SCALED_COLUMNS = true;
constexpr int ROW_RUN = SUB_BLOCK;

static inline ivec dot_halves(ivec sum, ivec a, std::int32_t b) { return sum + sum_pairs((svec)a, (svec)(ivec{} + b)); }

// The number of columns whose products are summed up in 16 bits: each adds two products of a code and an activation.
template <int MAX_CODE> constexpr int COLUMNS = 32767 / (2 * 127 * MAX_CODE);

template <int MAX_CODE, int R, int COUNT, typename W>
ALWAYS_INLINE inline void dot_scaled_columns(const W &w, int first, const std::int8_t *x, ivec scales, ivec *sums) {
  static_assert(COLUMNS<MAX_CODE> > 0);
  svec pairs[R];
  UNROLL for (int i = 0; i < COUNT; i++) {
    const ivec codes = w(first + i);
    UNROLL for (int r = 0; r < R; r++) {
      std::int32_t x4_bits;
      std::memcpy(&x4_bits, x + r * SUB_BLOCK + 4 * (first + i), sizeof x4_bits);
      const svec products = pair_products(codes, ivec{} + x4_bits);
      pairs[r] = i % COLUMNS<MAX_CODE> == 0 ? products : pairs[r] + products;
      // Without the empty assembly, GCC moves all additions behind all products, for which there are too few registers.
      asm("" : "+v"(pairs[r]));
      if (i % COLUMNS<MAX_CODE> == COLUMNS<MAX_CODE> - 1 || i == COUNT - 1) sums[r] += sum_pairs(pairs[r], (svec)scales);
    }
  }
}

template <int MAX_CODE, int R, int COUNT, typename W>
ALWAYS_INLINE inline void dot_columns(const W &w, int first, const std::int8_t *x, ivec *sums) {
  if constexpr (COLUMNS<MAX_CODE> > 0) {
    dot_scaled_columns<MAX_CODE, R, COUNT>(w, first, x, ivec{} + 0x00010001, sums);
  } else {
    UNROLL for (int i = first; i < first + COUNT; i++) {
      const ivec codes = w(i);
      UNROLL for (int r = 0; r < R; r++) {
        sums[r] = dot4_accumulate<MAX_CODE>(sums[r], codes, x + r * SUB_BLOCK + 4 * i);
        asm("" : "+v"(sums[r]));
      }
    }
  }
}
