// The parts of attention: a block's scores, its softmax, its values, and the merge of segments.
//
// A row's bits do not depend on the rows beside it: the borders of blocks and segments do not depend on the number of threads,
// every sum has a fixed order, and a block of which a row sees nothing leaves its maximum, sum and output as they were.
#pragma once

#include "brief.h"
#include "packed.h"
#include "vectors.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace {

using std::int64_t;

constexpr int64_t BLOCK = 128;    // keys at a time
constexpr int64_t SEGMENT = 512;  // keys that one thread takes
constexpr int ROWS = 6;           // rows of a tile
constexpr int COLUMNS = TILE / ROWS;
constexpr float NEVER = -std::numeric_limits<float>::infinity();

// Prefetches the next block while this one is computed. Each group of rows fetches its share of the rows of K^T and V, in small
// steps, so that memory is busy evenly.
template <typename E>
struct Fetch {
  const E *next;       // the first of this group's share
  int64_t row, steps;  // numbers to the next row; steps that one row is fetched in
};

template <typename E>
struct Fetching {
  explicit Fetching(Fetch<E> f) : next(f.next), row(f.row), steps(f.steps), left(f.steps) {}

  template <int C>
  inline void fetch() const {
    constexpr int LINE = 64 / sizeof(E);  // numbers that come together
    UNROLLED for (int i = 0; i < C * LANES; i += LINE) __builtin_prefetch(next + i);
  }

  inline void step() {
    next = --left ? next : next + row;
    left = left ? left : steps;
  }

  const E *next;
  const int64_t row, steps;
  int64_t left;
};

// R rows of q (R, d) times C x LANES keys of kt (d, keys): scores (R, BLOCK).
template <int R, int C, typename E>
inline void score(const float *q, int64_t d, const E *kt, int64_t kt_row, Fetch<E> fetch, float *s) {
  vec acc[R * C] = {};
  Fetching<E> ahead(fetch);
  for (int64_t i = 0; i < d; i++, ahead.step()) {
    vec b[C];
    UNROLLED for (int c = 0; c < C; c++) b[c] = load(kt + i * kt_row + c * LANES);
    ahead.template fetch<C>();
    UNROLLED for (int r = 0; r < R; r++) {
      UNROLLED for (int c = 0; c < C; c++) acc[r * C + c] = fused(every(q[r * d + i]), b[c], acc[r * C + c]);
    }
  }
  UNROLLED for (int r = 0; r < R; r++) {
    UNROLLED for (int c = 0; c < C; c++) store(s + r * BLOCK + c * LANES, acc[r * C + c]);
  }
}

// out (R, d) += p (R, BLOCK) times v (keys, d), C x LANES columns of it.
template <int R, int C, typename E>
inline void mix(const float *p, int64_t keys, const E *v, int64_t v_row, Fetch<E> fetch, float *out, int64_t d) {
  vec acc[R * C];
  UNROLLED for (int r = 0; r < R; r++) {
    UNROLLED for (int c = 0; c < C; c++) acc[r * C + c] = load(out + r * d + c * LANES);
  }
  Fetching<E> ahead(fetch);
  for (int64_t j = 0; j < keys; j++, ahead.step()) {
    vec b[C];
    UNROLLED for (int c = 0; c < C; c++) b[c] = load(v + j * v_row + c * LANES);
    ahead.template fetch<C>();
    UNROLLED for (int r = 0; r < R; r++) {
      UNROLLED for (int c = 0; c < C; c++) acc[r * C + c] = fused(every(p[r * BLOCK + j]), b[c], acc[r * C + c]);
    }
  }
  UNROLLED for (int r = 0; r < R; r++) {
    UNROLLED for (int c = 0; c < C; c++) store(out + r * d + c * LANES, acc[r * C + c]);
  }
}

template <typename E>
inline Fetch<E> moved(Fetch<E> f, int64_t numbers) { return {f.next + numbers, f.row, f.steps}; }

template <int R, typename E>
void score_rows(const float *q, int64_t d, const E *kt, int64_t kt_row, int64_t keys, Fetch<E> fetch, float *s) {
  int64_t j = 0;
  for (; j + COLUMNS * LANES <= keys; j += COLUMNS * LANES) {
    score<R, COLUMNS>(q, d, kt + j, kt_row, moved(fetch, j), s + j);
  }
  for (; j + LANES <= keys; j += LANES) score<R, 1>(q, d, kt + j, kt_row, moved(fetch, j), s + j);
  for (; j < keys; j++) {
    for (int r = 0; r < R; r++) {
      float total = 0;
      for (int64_t i = 0; i < d; i++) total = fused(q[r * d + i], number(kt + i * kt_row + j), total);
      s[r * BLOCK + j] = total;
    }
  }
}

template <int R, typename E>
void mix_rows(const float *p, int64_t keys, const E *v, int64_t v_row, Fetch<E> fetch, float *out, int64_t d) {
  int64_t c = 0;
  for (; c + COLUMNS * LANES <= d; c += COLUMNS * LANES) {
    mix<R, COLUMNS>(p, keys, v + c, v_row, moved(fetch, c), out + c, d);
  }
  for (; c < d; c += LANES) mix<R, 1>(p, keys, v + c, v_row, moved(fetch, c), out + c, d);
}

// k (keys, d) -> kt (d, BLOCK), d a multiple of LANES.
void transpose_block(const float *k, int64_t k_row, int64_t keys, int64_t d, float *kt) {
  for (int64_t j = 0; j < keys; j += LANES) {
    for (int64_t i = 0; i < d; i += LANES) {
      vec a[LANES];
      for (int64_t r = 0; r < LANES; r++) {
        a[r] = load(k + std::min(j + r, keys - 1) * k_row + i);
        __builtin_prefetch(k + (j + r + BLOCK) * k_row + i);
      }
      transpose(a);
      for (int64_t r = 0; r < LANES; r++) store(kt + (i + r) * BLOCK + j, a[r]);
    }
  }
}

// Splits rows into even groups of at most ROWS and calls what(R, first row, share); share(start, row, rows) is the group's part
// of the next block to prefetch.
template <typename What>
inline void in_groups(int64_t rows, const What &what) {
  const int64_t groups = (rows + ROWS - 1) / ROWS;
  for (int64_t g = 0, first = 0; g < groups; g++) {
    const int64_t end = rows * (g + 1) / groups;
    const auto share = [=](const auto *start, int64_t row, int64_t all) {
      return Fetch<std::decay_t<decltype(*start)>>{start + all * g / groups * row, row, groups};
    };
    with_number<ROWS>(end - first, [&](auto R) { what(R, first, share); });
    first = end;
  }
}

int64_t padded(int64_t rows) { return (rows + LANES - 1) / LANES * LANES; }

// The result of one part of the text for the rows of one KV head, padded to whole vectors of rows.
struct Partial {
  float *out, *high, *total;  // (rows, d) not yet divided, lines of padding; (rows,) maxima and sums of the exponentials
};

// Turns a block's scores (rows, BLOCK) into weights, and rescales earlier results where a maximum rises. LANES rows are processed
// at a time, so that values of a row fill one vector.
void soften(float *s, int64_t rows, int64_t keys, int64_t d, Partial part) {
  int64_t end = keys;
  for (; end % 16; end++) {
    for (int64_t r = 0; r < rows; r++) s[r * BLOCK + end] = NEVER;
  }
  for (int64_t first = 0; first < rows; first += LANES) {
    const int64_t count = std::min<int64_t>(LANES, rows - first);
    float *own = s + first * BLOCK;
    vec each[LANES];
    for (int64_t r = 0; r < LANES; r++) each[r] = every(NEVER);
    for (int64_t r = 0; r < count; r++) {
      vec best = load(own + r * BLOCK), other = best;
      int64_t j = LANES;
      for (; j + LANES < end; j += 2 * LANES) {
        best = larger(load(own + r * BLOCK + j), best);
        other = larger(load(own + r * BLOCK + j + LANES), other);
      }
      if (j < end) best = larger(load(own + r * BLOCK + j), best);
      each[r] = larger(best, other);
    }
    const vec before = load(part.high + first);
    const vec high = larger(across<Larger, LANES>(each), before);
    const vec base = high == NEVER ? vec{} : high;  // rows that see nothing yet
    const vec kept = exponential(before - base);
    float bases[LANES], keeps[LANES];
    store(bases, base);
    store(keeps, kept);
    for (int64_t r = 0; r < LANES; r++) each[r] = vec{};
    for (int64_t r = 0; r < count; r++) {
      float *row = own + r * BLOCK;
      Sixteen total;
      for (int64_t j = 0; j < end; j += 16) {
        UNROLLED for (int i = 0; i < Sixteen::VECTORS; i++) {
          const vec p = exponential(load(row + j + i * LANES) - bases[r]);
          store(row + j + i * LANES, p);
          total.part[i] += p;
        }
      }
      each[r] = total.folded();
      if (keeps[r] != 1.0f) {
        float *out = part.out + (first + r) * d;
        for (int64_t c = 0; c < d; c += LANES) store(out + c, load(out + c) * keeps[r]);
      }
    }
    store(part.high + first, high);
    store(part.total + first, fused(load(part.total + first), kept, sums<LANES>(each)));
  }
}

// Scaled rows of q (rows, d), and their result so far.
struct Queries {
  const float *q;
  int64_t rows, d;
  Partial part;
  float cap = 0;      // Scoring's
  int64_t begin = 0;  // the first key that any of the rows sees
  bool brief = false;  // whether q is what brief.h made of it, and products are brief.h's
};

bool is_brief(const KeysValues &kv) { return TILES && kv.format == Kept::BFLOAT16; }

// Scaled rows of q, and the floats that they take.
int64_t scaled_size(int64_t rows, int64_t d, bool brief) {
#if defined(LONGDRAFT_AMX)
  if (brief) return brief::whole(rows, brief::SIDE) * brief::whole(d, brief::DEEP) / 2;
#endif
  return Scratch::whole_lines(rows * d);
}

void scale_queries(const float *q, int64_t rows, int64_t d, float scale, bool brief, float *to) {
#if defined(LONGDRAFT_AMX)
  if (brief) return brief::round_queries(q, rows, d, scale, reinterpret_cast<Brief *>(to));
#endif
  for (int64_t i = 0; i < rows * d; i++) to[i] = q[i] * scale;
}

// Of (rows, BLOCK), each key's column times its scale.
void scale_keys(float *s, int64_t rows, int64_t keys, const float *scales) {
  for (int64_t r = 0; r < rows; r++, s += BLOCK) {
    int64_t j = 0;
    for (; j + LANES <= keys; j += LANES) store(s + j, load(s + j) * load(scales + j));
    for (; j < keys; j++) s[j] *= scales[j];
  }
}

// Caps scores (rows, BLOCK), a whole vector at a time: a score's bits do not depend on its place.
void cap_scores(float *s, int64_t rows, int64_t keys, float cap) {
  const float inverse = 1.0f / cap;
  for (int64_t r = 0; r < rows; r++, s += BLOCK) {
    for (int64_t j = 0; j < keys; j += LANES) store(s + j, cap * hyperbolic_tangent(load(s + j) * inverse));
  }
}

// Scores (rows, BLOCK) of keys [a, a + keys); turned: room for the keys, transposed.
void score_block(const Queries &in, const Text &text, int64_t a, int64_t keys, float *s, float *turned) {
  const auto score_keys = [&](auto *kt, int64_t kt_row, auto *next) {
    in_groups(in.rows, [&](auto R, int64_t r, auto share) {
      score_rows<R.value>(in.q + r * in.d, in.d, kt, kt_row, keys, share(next, kt_row, in.d), s + r * BLOCK);
    });
  };
  if (in.brief) {
#if defined(LONGDRAFT_AMX)
    brief::score(reinterpret_cast<const Brief *>(in.q), in.rows, in.d, static_cast<Brief *>(text.k) + a, text.k_dim, keys, s, BLOCK);
#endif
  } else if (text.format == Kept::FLOAT32 && text.k_row != 1) {
    transpose_block(static_cast<float *>(text.k) + a * text.k_row, text.k_row, keys, in.d, turned);
    score_keys(turned, BLOCK, turned);
  } else {
    as_stored(text.k, text.format, [&](auto *k) { score_keys(k + a, text.k_dim, k + a + BLOCK); });
  }
  if (text.k_scale) scale_keys(s, in.rows, keys, text.k_scale + a);
  if (in.cap) cap_scores(s, in.rows, keys, in.cap);
}

// Adds the values of keys [a + from, a + keys) with weights p (rows, BLOCK) of the keys from a on, which are overwritten.
void mix_block(const Queries &in, const Text &text, int64_t a, int64_t from, int64_t keys, float *p) {
#if defined(LONGDRAFT_AMX)
  if (in.brief) {
    const Brief *v = static_cast<Brief *>(text.v) + a * text.v_row;
    return brief::mix(p, BLOCK, in.rows, v, text.v_row, from, keys, in.d, in.part.out);
  }
#endif
  a += from, keys -= from, p += from;
  if (text.v_scale) scale_keys(p, in.rows, keys, text.v_scale + a);
  as_stored(text.v, text.format, [&](auto *values) {
    auto *v = values + a * text.v_row;
    in_groups(in.rows, [&](auto R, int64_t r, auto share) {
      const auto fetch = share(v + BLOCK * text.v_row, text.v_row, keys);
      mix_rows<R.value>(p + r * BLOCK, keys, v, text.v_row, fetch, in.part.out + r * in.d, in.d);
    });
  });
}

// Sets the scores (rows, BLOCK) of keys [a, a + keys) to NEVER where they lie before the row's first: begins[r % each].
inline void hide_before(float *s, int64_t rows, int64_t a, int64_t keys, const std::int32_t *begins, int64_t each) {
  if (!begins) return;
  for (int64_t r = 0; r < rows; r++, s += BLOCK) {
    const int64_t hidden = begins[r % each] - a;
    if (hidden > 0) std::fill_n(s, std::min(keys, hidden), NEVER);
  }
}

// Keys [a, a + keys), some of which are seen; hide(s, a, keys) sets the scores of what a row does not see to NEVER. Keys that no
// row sees are not read: with the weight 0 they would change nothing.
template <typename Hide>
inline void attend_block(const Queries &in, const Text &text, int64_t a, int64_t keys, float *s, float *turned,
                         const Hide &hide) {
  const int64_t unseen = std::max<int64_t>(0, in.begin - a), skipped = unseen / 16 * 16;  // whole vectors
  score_block(in, text, a + skipped, keys - skipped, s + skipped, turned);
  hide(s, a, keys);
  soften(s, in.rows, keys, in.d, in.part);
  mix_block(in, text, a, unseen, keys, s);
}

// A partial's floats, and the partial that lies in them, empty.
int64_t partial_size(int64_t rows, int64_t d) { return Scratch::whole_lines(padded(rows) * (d + 2)); }

Partial partial_at(float *place, int64_t rows, int64_t d) {
  return {place, place + padded(rows) * d, place + padded(rows) * (d + 1)};
}

Partial empty_partial(float *place, int64_t rows, int64_t d) {
  const Partial part = partial_at(place, rows, d);
  std::fill(part.out, part.high, 0.0f);
  std::fill(part.high, part.total, NEVER);
  std::fill(part.total, part.total + padded(rows), 0.0f);
  return part;
}

// Merges the next segment into the result of the earlier ones. A segment of which a row sees nothing changes nothing.
void join(const Partial &all, const Partial &next, int64_t rows, int64_t d) {
  for (int64_t r = 0; r < rows; r++) {
    const float high = std::max(all.high[r], next.high[r]);
    if (high == NEVER) continue;
    // std::exp differs between systems.
    const float ours = exponential(every(all.high[r] - high))[0], theirs = exponential(every(next.high[r] - high))[0];
    float *out = all.out + r * d;
    const float *other = next.out + r * d;
    for (int64_t c = 0; c < d; c += LANES) store(out + c, fused(every(theirs), load(other + c), load(out + c) * ours));
    all.total[r] = fused(theirs, next.total[r], all.total[r] * ours);
    all.high[r] = high;
  }
}

// sinks[r / each]: a score of row r's that has no value, or null.
void divide(const Partial &part, int64_t rows, int64_t d, float *out, const float *sinks = nullptr, int64_t each = 1) {
  for (int64_t r = 0; r < rows; r++) {
    float kept = 1.0f, total = part.total[r];
    if (sinks) {
      const float sink = sinks[r / each], high = std::max(part.high[r], sink);
      kept = exponential(every(part.high[r] - high))[0];
      total = fused(kept, total, exponential(every(sink - high))[0]);
    }
    for (int64_t c = 0; c < d; c++) out[r * d + c] = part.out[r * d + c] * kept / total;
  }
}

}  // namespace
