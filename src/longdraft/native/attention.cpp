// Attention of a few rows to a long prefix: keys and values are read once for all rows of a group of query heads.
//
// Block by block: scores, a running softmax, the values mixed in; a block's scores never leave the caches. The text is
// cut into as many parts as keep all cores busy, and the parts are merged by their maxima and sums.
#include "kernels.h"
#include "vectors.h"

#include <algorithm>
#include <cmath>
#include <limits>

using std::int64_t;

namespace {

constexpr int64_t BLOCK = 128;  // keys at a time
constexpr int ROWS = 6;         // rows of a tile
constexpr int COLUMNS = TILE / ROWS;
constexpr float NEVER = -std::numeric_limits<float>::infinity();

// The next block, fetched while this one is computed: each group of rows fetches its share of the rows of K^T and V, a
// row in as many steps as there are groups, so that memory is kept busy evenly.
struct Fetch {
  const float *next;   // the first of this group's share
  int64_t row, steps;  // floats to the next row; steps that one row is fetched in
};

struct Fetching {
  explicit Fetching(Fetch f) : next(f.next), row(f.row), steps(f.steps), left(f.steps) {}

  inline void step() {
    next = --left ? next : next + row;
    left = left ? left : steps;
  }

  const float *next;
  const int64_t row, steps;
  int64_t left;
};

// R rows of q (R, d) times C x LANES keys of kt (d, keys): scores (R, BLOCK).
template <int R, int C>
inline void score(const float *q, int64_t d, const float *kt, int64_t kt_row, Fetch fetch, float *s) {
  vec acc[R * C] = {};
  Fetching ahead(fetch);
  for (int64_t i = 0; i < d; i++, ahead.step()) {
    vec b[C];
    UNROLLED for (int c = 0; c < C; c++) {
      b[c] = load(kt + i * kt_row + c * LANES);
      __builtin_prefetch(ahead.next + c * LANES);
    }
    UNROLLED for (int r = 0; r < R; r++) {
      UNROLLED for (int c = 0; c < C; c++) acc[r * C + c] += q[r * d + i] * b[c];
    }
  }
  UNROLLED for (int r = 0; r < R; r++) {
    UNROLLED for (int c = 0; c < C; c++) store(s + r * BLOCK + c * LANES, acc[r * C + c]);
  }
}

// out (R, d) += p (R, BLOCK) times v (keys, d), C x LANES columns of it.
template <int R, int C>
inline void mix(const float *p, int64_t keys, const float *v, int64_t v_row, Fetch fetch, float *out, int64_t d) {
  vec acc[R * C];
  UNROLLED for (int r = 0; r < R; r++) {
    UNROLLED for (int c = 0; c < C; c++) acc[r * C + c] = load(out + r * d + c * LANES);
  }
  Fetching ahead(fetch);
  for (int64_t j = 0; j < keys; j++, ahead.step()) {
    vec b[C];
    UNROLLED for (int c = 0; c < C; c++) {
      b[c] = load(v + j * v_row + c * LANES);
      __builtin_prefetch(ahead.next + c * LANES);
    }
    UNROLLED for (int r = 0; r < R; r++) {
      UNROLLED for (int c = 0; c < C; c++) acc[r * C + c] += p[r * BLOCK + j] * b[c];
    }
  }
  UNROLLED for (int r = 0; r < R; r++) {
    UNROLLED for (int c = 0; c < C; c++) store(out + r * d + c * LANES, acc[r * C + c]);
  }
}

inline Fetch moved(Fetch f, int64_t floats) { return {f.next + floats, f.row, f.steps}; }

template <int R>
void score_rows(const float *q, int64_t d, const float *kt, int64_t kt_row, int64_t keys, Fetch fetch, float *s) {
  int64_t j = 0;
  for (; j + COLUMNS * LANES <= keys; j += COLUMNS * LANES) {
    score<R, COLUMNS>(q, d, kt + j, kt_row, moved(fetch, j), s + j);
  }
  for (; j + LANES <= keys; j += LANES) score<R, 1>(q, d, kt + j, kt_row, moved(fetch, j), s + j);
  for (; j < keys; j++) {
    for (int r = 0; r < R; r++) {
      float total = 0;
      for (int64_t i = 0; i < d; i++) total += q[r * d + i] * kt[i * kt_row + j];
      s[r * BLOCK + j] = total;
    }
  }
}

template <int R>
void mix_rows(const float *p, int64_t keys, const float *v, int64_t v_row, Fetch fetch, float *out, int64_t d) {
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

// Rows in groups of at most ROWS, as even as can be: what(R, first row, share), where share(start, row, rows) says what of
// the next block's rows the group fetches.
template <int R, typename What, typename Share>
inline void group(int64_t rows, int64_t first, const What &what, const Share &share) {
  if (rows == R) return what(std::integral_constant<int, R>{}, first, share);
  if constexpr (R > 1) group<R - 1>(rows, first, what, share);
}

template <typename What>
inline void in_groups(int64_t rows, const What &what) {
  const int64_t groups = (rows + ROWS - 1) / ROWS;
  for (int64_t g = 0, first = 0; g < groups; g++) {
    const int64_t end = rows * (g + 1) / groups;
    group<ROWS>(end - first, first, what, [=](const float *start, int64_t row, int64_t all) {
      return Fetch{start + all * g / groups * row, row, groups};
    });
    first = end;
  }
}

// What one part of the text gives for the rows of one KV head. Room for whole vectors of rows.
struct Partial {
  float *out, *high, *total;  // (rows, d) not yet divided; (rows,) maxima and sums of the exponentials
};

// A block's scores (rows, BLOCK) become weights; what was mixed before shrinks where a maximum rises. LANES rows at a
// time, so that what there is once a row is done for all of them together.
void soften(float *s, int64_t rows, int64_t keys, int64_t d, Partial part) {
  int64_t end = keys;
  for (; end % LANES; end++) {
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
      vec total = {};
      for (int64_t j = 0; j < end; j += LANES) {
        const vec p = exponential(load(row + j) - bases[r]);
        store(row + j, p);
        total += p;
      }
      each[r] = total;
      if (keeps[r] != 1.0f) {
        float *out = part.out + (first + r) * d;
        for (int64_t c = 0; c < d; c += LANES) store(out + c, load(out + c) * keeps[r]);
      }
    }
    store(part.high + first, high);
    store(part.total + first, load(part.total + first) * kept + sums<LANES>(each));
  }
}

// Where a head's keys and values lie.
struct Text {
  const float *k, *v;
  int64_t k_row, k_dim, v_row;
};

// Room for a block's scores (rows, BLOCK) and its keys, transposed.
struct Room {
  float *scores, *turned;
};

// Keys [a, a + keys) for rows of q, scaled; hide(s, a, keys) sets the scores of what a row does not see to NEVER.
template <typename Hide>
inline void attend_block(const float *q, int64_t rows, int64_t d, const Text &text, int64_t a, int64_t keys, Room room,
                         Partial part, const Hide &hide) {
  const float *kt = text.k + a * text.k_row, *v = text.v + a * text.v_row;
  float *s = room.scores;
  const bool turns = text.k_row != 1;
  if (turns) transpose_block(kt, text.k_row, keys, d, room.turned);
  const float *block = turns ? room.turned : kt, *next = turns ? room.turned : kt + BLOCK;
  const int64_t block_row = turns ? BLOCK : text.k_dim;
  in_groups(rows, [&](auto R, int64_t r, auto share) {
    score_rows<R.value>(q + r * d, d, block, block_row, keys, share(next, block_row, d), s + r * BLOCK);
  });
  hide(s, a, keys);
  soften(s, rows, keys, d, part);
  in_groups(rows, [&](auto R, int64_t r, auto share) {
    const Fetch fetch = share(v + BLOCK * text.v_row, text.v_row, keys);
    mix_rows<R.value>(s + r * BLOCK, keys, v, text.v_row, fetch, part.out + r * d, d);
  });
}

int64_t padded(int64_t rows) { return (rows + LANES - 1) / LANES * LANES; }

// A partial's floats, and the partial that lies in them, empty.
int64_t partial_size(int64_t rows, int64_t d) { return Scratch::whole_lines(rows * d + 2 * padded(rows)); }

Partial empty_partial(float *place, int64_t rows, int64_t d) {
  const Partial part{place, place + rows * d, place + rows * d + padded(rows)};
  std::fill(part.out, part.high, 0.0f);
  std::fill(part.high, part.total, NEVER);
  std::fill(part.total, part.total + padded(rows), 0.0f);
  return part;
}

}  // namespace

void longdraft_attend(const float *q, const float *k, int64_t k_head, int64_t k_row, int64_t k_dim, const float *v,
                      int64_t v_head, int64_t v_row, int64_t heads, int64_t rows, int64_t d, int64_t n,
                      const std::uint8_t *mask, int64_t mask_rows, int64_t width, float scale, float *out, int threads) {
  static thread_local Scratch of_caller;
  const int64_t blocks = (n + BLOCK - 1) / BLOCK;
  const int64_t parts = threads == 1 ? 1 : std::min<int64_t>(blocks, (4 * threads + heads - 1) / heads);
  const int64_t size = partial_size(rows, d);
  float *partials = of_caller.of(heads * (parts * size + rows * d));
  float *scaled = partials + heads * parts * size;
  for (int64_t i = 0; i < heads * rows * d; i++) scaled[i] = q[i] * scale;
  const auto hide = [=](float *s, int64_t a, int64_t keys) {
    if (!mask || a + keys <= n - width) return;
    for (int64_t r = 0; r < rows; r++) {
      const std::uint8_t *seen = mask + r % mask_rows * width;
      for (int64_t j = std::max(a, n - width); j < a + keys; j++) {
        if (!seen[j - (n - width)]) s[r * BLOCK + j - a] = NEVER;
      }
    }
  };
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t item = 0; item < heads * parts; item++) {
    static thread_local Scratch own;
    const int64_t head = item / parts, p = item % parts;
    const int64_t from = blocks * p / parts * BLOCK, to = std::min(n, blocks * (p + 1) / parts * BLOCK);
    float *s = own.of(BLOCK * (rows + d));
    const Partial part = empty_partial(partials + item * size, rows, d);
    const Text text{k + head * k_head, v + head * v_head, k_row, k_dim, v_row};
    for (int64_t a = from; a < to; a += BLOCK) {
      const Room room{s, s + BLOCK * rows};
      attend_block(scaled + head * rows * d, rows, d, text, a, std::min(BLOCK, to - a), room, part, hide);
    }
  }
  for (int64_t row = 0; row < heads * rows; row++) {
    const float *first = partials + row / rows * parts * size + row % rows * d;
    const float *highs = partials + row / rows * parts * size + rows * d + row % rows;
    float high = NEVER, total = 0;
    for (int64_t p = 0; p < parts; p++) high = std::max(high, highs[p * size]);
    float *y = out + row * d;
    std::fill(y, y + d, 0.0f);
    for (int64_t p = 0; p < parts; p++) {
      const float weight = std::exp(highs[p * size] - high);
      total += weight * highs[p * size + padded(rows)];
      for (int64_t c = 0; c < d; c++) y[c] += weight * first[p * size + c];
    }
    for (int64_t c = 0; c < d; c++) y[c] /= total;
  }
}

void longdraft_attend_chunk(const float *q, const float *k, int64_t k_head, int64_t k_row, int64_t k_dim, const float *v,
                            int64_t v_head, int64_t v_row, int64_t heads, int64_t group, int64_t rows, int64_t d, int64_t n,
                            float scale, float *out, int threads) {
  constexpr int64_t TOGETHER = 16 * ROWS;  // rows whose scores the second-level cache holds beside a block
  const int64_t tiles = (rows + TOGETHER - 1) / TOGETHER;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t item = 0; item < heads * tiles; item++) {
    static thread_local Scratch own;
    // The last rows see most: begun first, they do not leave one thread at work alone.
    const int64_t head = item % heads, first = (tiles - 1 - item / heads) * TOGETHER;
    const int64_t count = std::min(TOGETHER, rows - first), before = n - rows + first;
    float *s = own.of((BLOCK + d) * TOGETHER + BLOCK * d + partial_size(TOGETHER, d));
    float *turned = s + BLOCK * TOGETHER, *scaled = turned + BLOCK * d;
    const Partial part = empty_partial(scaled + d * TOGETHER, count, d);
    const float *own_q = q + (head * rows + first) * d;
    for (int64_t i = 0; i < count * d; i++) scaled[i] = own_q[i] * scale;
    const Text text{k + head / group * k_head, v + head / group * v_head, k_row, k_dim, v_row};
    const auto hide = [=](float *scores, int64_t a, int64_t keys) {
      for (int64_t r = 0; r < count; r++) {  // row r sees keys up to before + r
        for (int64_t j = std::max(a, before + r + 1); j < a + keys; j++) scores[r * BLOCK + j - a] = NEVER;
      }
    };
    for (int64_t a = 0; a < before + count; a += BLOCK) {
      attend_block(scaled, count, d, text, a, std::min(BLOCK, before + count - a), {s, turned}, part, hide);
    }
    for (int64_t r = 0; r < count; r++) {
      float *y = out + (head * rows + first + r) * d;
      for (int64_t c = 0; c < d; c++) y[c] = part.out[r * d + c] / part.total[r];
    }
  }
}
