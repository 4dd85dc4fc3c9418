// dot_columns() of isa.h by vpmaddubsw, for processors without VNNI: products are summed up in 16 bits, as many as fit, before they are
// widened by vpmaddwd, which multiplies them with a scale as well (dot_scaled_columns()).

constexpr bool HAVE_DOT_COLUMNS = true, HAVE_SCALED_COLUMNS = true;
constexpr int ROW_RUN = SUB_BLOCK;

static inline ivec dot_halves(ivec sum, ivec a, std::int32_t b) { return sum + sum_pairs((svec)a, (svec)(ivec{} + b)); }

template <int MAX_CODE, int R, int COUNT, typename W>
ALWAYS_INLINE inline void dot_scaled_columns(const W &w, int first, const std::int8_t *x, ivec scales, ivec *sums) {
  constexpr int COLUMNS = 32767 / (2 * 127 * MAX_CODE);  // a column adds two products of a code and an activation to 16 bits
  svec pairs[R];
  UNROLL for (int i = 0; i < COUNT; i++) {
    const ivec codes = w(first + i);
    UNROLL for (int r = 0; r < R; r++) {
      const std::int8_t *x4 = x + r * SUB_BLOCK + 4 * (first + i);
      // Without the empty assembly, GCC moves all additions behind all products, for which there are too few registers.
      if constexpr (COLUMNS < 2) {
        sums[r] = dot4_accumulate<MAX_CODE>(sums[r], codes, x4);  // unscaled
        asm("" : "+v"(sums[r]));
      } else {
        std::int32_t x4_bits;
        std::memcpy(&x4_bits, x4, sizeof x4_bits);
        const svec products = pair_products(codes, ivec{} + x4_bits);
        pairs[r] = i % COLUMNS == 0 ? products : pairs[r] + products;
        asm("" : "+v"(pairs[r]));
        if (i % COLUMNS == COLUMNS - 1 || i == COUNT - 1) sums[r] += sum_pairs(pairs[r], (svec)scales);
      }
    }
  }
}

template <int MAX_CODE, int R, int COUNT, typename W>
ALWAYS_INLINE inline void dot_columns(const W &w, int first, const std::int8_t *x, ivec *sums) {
  dot_scaled_columns<MAX_CODE, R, COUNT>(w, first, x, ivec{} + 0x00010001, sums);
}
