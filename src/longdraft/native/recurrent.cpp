// Rows of recurrent layers, one after another, each from the state behind its parent in a tree.
//
// A head's state S (keys, values) gives a row's output and the next state:
//     u = (v - (d S)^T k) beta     or, without correction, u = v beta
//     out = (d S)^T q + (k q) u    and    S' = d S + k u^T
// with a decay d for the head or for each key. So a row reads the state once for both products, and writes it once if another
// row comes behind it. Columns of S do not depend on each other: a few of them at a time stay in the nearest cache while all
// rows pass over them.
#include <cmath>
#include <vector>

#include "kernels.h"
#include "parts.h"
#include "threads.h"
#include "vectors.h"

namespace {

using std::int64_t;

constexpr int WIDTH = 2;                    // vectors of columns that are computed together
constexpr int64_t COLUMNS = WIDTH * LANES;  // their numbers
constexpr int SUMS = 4;                     // partial sums over the keys, for each of those vectors

// What a row needs of one head: (keys,) each, then single numbers.
struct Prepared {
  float *decay, *decayed_key, *key, *decayed_query;
  float key_query, beta, skip;
};

// In a fixed order, whatever the vectors' size.
float dot(const float *a, const float *b, int64_t size) {
  float part[16] = {};
  for (int64_t i = 0; i < size; i++) part[i % 16] = fused(a[i], b[i], part[i % 16]);
  for (int step = 8; step; step /= 2) {
    for (int i = 0; i < step; i++) part[i] += part[i + step];
  }
  return part[0];
}

// memory: room for what has (keys,), each a multiple of cache lines.
Prepared prepare(const Recurrence &r, const RecurrentRows &rows, int64_t row, int64_t head, float *memory) {
  const int64_t n = r.keys, size = Scratch::whole_lines(n), own = head / (r.heads / r.key_heads);
  const float *q = rows.q + (row * r.key_heads + own) * n, *k = rows.k + (row * r.key_heads + own) * n;
  Prepared out{memory, memory + size, memory + 2 * size, memory + 3 * size, 0.0f, 0.0f, r.skip ? r.skip[head] : 0.0f};
  float of_q = r.scale, of_k = 1.0f;
  if (r.normalised) {
    of_q *= 1.0f / std::sqrt(dot(q, q, n) + r.eps);
    of_k = 1.0f / std::sqrt(dot(k, k, n) + r.eps);
  }
  const float *g = rows.g + (row * r.heads + head) * (r.by_key ? n : 1);
  float decay = 0.0f;
  if (r.a) {  // Mamba-2: the step size makes both the decay and the weight of the input
    out.beta = softplus(*g + (r.bias ? r.bias[head] : 0.0f));
    decay = std::exp(out.beta * r.a[head]);
  } else {
    out.beta = rows.beta[row * r.heads + head];
    decay = std::exp(*g);
  }
  float *query = out.decayed_query;
  for (int64_t i = 0; i < n; i++) {
    out.key[i] = k[i] * of_k;
    query[i] = q[i] * of_q;
  }
  out.key_query = dot(out.key, query, n);  // before they decay: a decay may be 0
  for (int64_t i = 0; i < n; i++) {
    out.decay[i] = r.by_key ? std::exp(g[i]) : decay;
    out.decayed_key[i] = out.decay[i] * out.key[i];
    query[i] *= out.decay[i];
  }
  return out;
}

// COLUMNS columns of a state, (keys, COLUMNS), and what a row makes of them.
template <bool CORRECTED, bool READ>
inline void products(const float *s, const Prepared &row, int64_t keys, vec *memory, vec *found) {
  vec m[SUMS][WIDTH] = {}, f[SUMS][WIDTH] = {};
  const auto one = [&](int64_t i, int j) {
    const vec k = every(row.decayed_key[i]), q = every(row.decayed_query[i]);
    UNROLLED for (int w = 0; w < WIDTH; w++) {
      const vec x = load(s + i * COLUMNS + w * LANES);
      if constexpr (CORRECTED) m[j][w] = fused(x, k, m[j][w]);
      if constexpr (READ) f[j][w] = fused(x, q, f[j][w]);
    }
  };
  int64_t i = 0;
  for (; i + SUMS <= keys; i += SUMS) {
    UNROLLED for (int j = 0; j < SUMS; j++) one(i + j, j);
  }
  for (; i < keys; i++) one(i, 0);
  UNROLLED for (int w = 0; w < WIDTH; w++) {
    memory[w] = (m[0][w] + m[1][w]) + (m[2][w] + m[3][w]);
    found[w] = (f[0][w] + f[1][w]) + (f[2][w] + f[3][w]);
  }
}

// Computes a row: its output, unless out is null, and the state behind it in `after`, unless that is null.
void compute(const float *before, float *after, const Prepared &row, int64_t keys, bool corrected, const float *v, float *out,
             int64_t columns) {
  vec memory[WIDTH], found[WIDTH], u[WIDTH];
  if (corrected) {
    out ? products<true, true>(before, row, keys, memory, found) : products<true, false>(before, row, keys, memory, found);
  } else {
    out ? products<false, true>(before, row, keys, memory, found) : products<false, false>(before, row, keys, memory, found);
  }
  UNROLLED for (int w = 0; w < WIDTH; w++) {
    const int64_t here = std::max<int64_t>(0, std::min<int64_t>(LANES, columns - w * LANES));
    const vec x = here == LANES ? load(v + w * LANES) : load_some(v + w * LANES, here);
    u[w] = (corrected ? x - memory[w] : x) * every(row.beta);
    if (!out) continue;
    const vec y = fused(x, every(row.skip), fused(u[w], every(row.key_query), found[w]));
    here == LANES ? store(out + w * LANES, y) : store_some(out + w * LANES, y, here);
  }
  if (!after) return;
  for (int64_t i = 0; i < keys; i++) {
    const vec d = every(row.decay[i]), k = every(row.key[i]);
    UNROLLED for (int w = 0; w < WIDTH; w++) {
      const int64_t at = i * COLUMNS + w * LANES;
      store(after + at, fused(u[w], k, load(before + at) * d));
    }
  }
}

// Copies some columns of a head's state (keys, values), with zeros up to COLUMNS.
void copy_columns(const float *from, int64_t from_row, float *to, int64_t to_row, int64_t keys, int64_t columns, bool padded) {
  for (int64_t i = 0; i < keys; i++) {
    std::memcpy(to + i * to_row, from + i * from_row, sizeof(float) * columns);
    if (padded) std::memset(to + i * to_row + columns, 0, sizeof(float) * (COLUMNS - columns));
  }
}

// One head of one sequence.
void head_of(const Recurrence &r, const RecurrentSequence &s, int64_t head) {
  static thread_local Scratch scratch;
  static thread_local std::vector<Prepared> prepared;  // by row: the pending ones, then the tree's
  const int64_t n = r.keys, each = 4 * Scratch::whole_lines(n), rows = s.pending.count + s.rows.count, state = n * COLUMNS;
  float *memory = scratch.of(each * rows + (s.rows.count + 1) * state), *states = memory + each * rows;
  prepared.resize(rows);
  const auto keep = [&](const RecurrentRows &of, int64_t row, int64_t at) {
    prepared[at] = prepare(r, of, row, head, memory + each * at);
  };
  for (int64_t row = 0; row < s.pending.count; row++) keep(s.pending, row, row);
  for (int64_t i = 0; i < s.needed; i++) keep(s.rows, s.order[i], s.pending.count + s.order[i]);
  float *own = s.state + head * n * r.values;
  for (int64_t first = 0; first < r.values; first += COLUMNS) {
    const int64_t columns = std::min<int64_t>(COLUMNS, r.values - first);
    const auto values = [&](const RecurrentRows &of, int64_t row) { return of.v + (row * r.heads + head) * r.values + first; };
    float *now = states;
    copy_columns(own + first, r.values, now, COLUMNS, n, columns, true);
    for (int64_t row = 0; row < s.pending.count; row++) {
      compute(now, now, prepared[row], n, r.corrected, values(s.pending, row), nullptr, columns);
    }
    if (s.pending.count) copy_columns(now, COLUMNS, own + first, r.values, n, columns, false);
    // Row i's state is number i + 1 of the states; the first are the committed rows'.
    for (int64_t i = 0; i < s.needed; i++) {
      const int64_t row = s.order[i];
      float *out = row < s.first ? nullptr : s.out + ((row - s.first) * r.heads + head) * r.values + first;
      float *after = s.inner[i] ? states + (row + 1) * state : nullptr;
      const float *before = states + (s.parents[row] + 1) * state;
      compute(before, after, prepared[s.pending.count + row], n, r.corrected, values(s.rows, row), out, columns);
    }
  }
}

// Some channels of all rows of a sequence.
void convolve_channels(const Convolution &c, const ConvolutionSequence &s, int64_t first, int64_t end) {
  constexpr int MOST = 8;  // inputs whose weights stay at hand
  for (int64_t at = first; at < end; at += LANES) {
    const int64_t here = std::min<int64_t>(LANES, end - at);
    const auto read = [&](const float *p) { return here == LANES ? load(p) : load_some(p, here); };
    const auto weights = [&](int64_t i) {
      float w[LANES] = {};
      for (int64_t l = 0; l < here; l++) w[l] = c.weight[(at + l) * c.inputs + i];
      return load(w);
    };
    vec known[MOST];
    for (int64_t i = 0; i < std::min<int64_t>(MOST, c.inputs); i++) known[i] = weights(i);
    const vec bias = c.bias ? read(c.bias + at) : vec{};
    for (int64_t row = 0; row < s.count; row++) {
      vec y = bias;
      for (int64_t i = 0; i < c.inputs; i++) {
        const int64_t place = s.places[row * c.inputs + i] - (c.inputs - 1);
        const float *x = (place < 0 ? s.window + (place + c.inputs - 1) * c.channels : s.rows + place * c.channels) + at;
        y = fused(read(x), i < MOST ? known[i] : weights(i), y);
      }
      if (c.silu) y = silu(y);
      float *out = s.out + row * c.channels + at;
      here == LANES ? store(out, y) : store_some(out, y, here);
    }
  }
}

}  // namespace

Code longdraft_recur(const Recurrence *recurrence, const RecurrentSequence *sequences, int64_t count, int threads) try {
  const Recurrence &r = *recurrence;
  share_out(threads, count * r.heads, [&](int64_t item) { head_of(r, sequences[item / r.heads], item % r.heads); });
  return DONE;
} CATCH_NO_MEMORY

Code longdraft_convolve(const Convolution *convolution, const ConvolutionSequence *sequences, int64_t count, int threads) try {
  constexpr int64_t SHARE = 256;
  const Convolution &c = *convolution;
  const int64_t shares = (c.channels + SHARE - 1) / SHARE;
  share_out(count * c.channels > 4 * SHARE ? threads : 1, count * shares, [&](int64_t item) {
    const int64_t first = item % shares * SHARE;
    convolve_channels(c, sequences[item / shares], first, std::min(c.channels, first + SHARE));
  });
  return DONE;
} CATCH_NO_MEMORY
