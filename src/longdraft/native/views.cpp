// Views of a long text: summaries of its chunks, the choice of the chunks with the highest scores, and copies of them. One call
// covers all layers and heads, because thirty calls for a small model would take longer than the computation.
#include "blocks.h"
#include "kernels.h"
#include "threads.h"

#include <vector>

using std::int64_t;

namespace {

// Scores (chunks,) of one layer and head: for each chunk, the queries' scores are reduced (views/scorers.py), then averaged over
// the query heads of the group.
void score_chunks(const Choice &in, const float *q, int64_t layer, int64_t head, float *scores, float *room) {
  const int64_t rows = in.group * in.rows, place = layer * in.layer + head * in.head + in.first;
  float *bounds = room, *other = bounds + rows * BLOCK, *positive = other + rows * BLOCK, *negative = positive + rows * in.d;
  if (in.kind == Scorer::QUEST) {
    for (int64_t i = 0; i < rows * in.d; i++) {
      positive[i] = std::max(q[i], 0.0f);
      negative[i] = std::min(q[i], 0.0f);
    }
  }
  const auto score = [&](const float *queries, const float *summaries, int64_t a, int64_t count, float *s) {
    const Text text{const_cast<float *>(summaries + place), nullptr, 1, in.dim, 0, Kept::FLOAT32, nullptr, nullptr};
    score_block({queries, rows, in.d, {}}, text, a, count, s, nullptr);
  };
  const int64_t chunks = in.behind - in.first;
  for (int64_t a = 0; a < chunks; a += BLOCK) {
    const int64_t count = std::min(BLOCK, chunks - a);
    if (in.kind == Scorer::MEAN_KEY) {
      score(q, in.mean, a, count, bounds);
    } else {
      score(in.kind == Scorer::QUEST ? positive : q, in.largest, a, count, bounds);
      score(in.kind == Scorer::QUEST ? negative : q, in.smallest, a, count, other);
      for (int64_t r = 0; r < rows; r++) {
        for (int64_t j = r * BLOCK; j < r * BLOCK + count; j++) {
          bounds[j] = in.kind == Scorer::QUEST ? bounds[j] + other[j] : std::max(bounds[j], other[j]);
        }
      }
    }
    std::fill_n(scores + a, count, 0.0f);
    for (int64_t g = 0; g < in.group; g++) {
      float *own = bounds + g * in.rows * BLOCK;
      for (int64_t r = 1; r < in.rows; r++) {
        for (int64_t j = 0; j < count; j++) {
          own[j] = in.most ? std::max(own[j], own[r * BLOCK + j]) : own[j] + own[r * BLOCK + j];
        }
      }
      for (int64_t j = 0; j < count; j++) scores[a + j] += own[j];
    }
  }
}

// The same for kinds that read the keys: the scores of all rows, block by block, which are then reduced.
void score_by_keys(const Choice &in, const float *q, int64_t layer, int64_t head, float *scores, Scratch &scratch) {
  constexpr int64_t POOL = 5;  // neighbours over which SnapKV averages
  const int64_t rows = in.group * in.rows, end = in.kind == Scorer::ATTENTION ? in.n : in.behind * in.chunk;
  const int64_t blocks = (end + BLOCK - 1) / BLOCK, each = rows * BLOCK;
  float *all = scratch.of((blocks + 1) * (each + BLOCK) + in.d * BLOCK), *mass = all + blocks * each;
  float *turned = mass + (blocks + 1) * BLOCK;
  const Text text = text_of(of_layer(*in.kv, layer), in.slot, head);
  for (int64_t a = 0; a < end; a += BLOCK) {
    float *own = all + a / BLOCK * each;
    std::fill_n(own, each, NEVER);
    score_block({q, rows, in.d, {}}, text, a, std::min(BLOCK, end - a), own, turned);
  }
  const int64_t chunks = in.behind - in.first;
  std::fill_n(scores, chunks, 0.0f);
  if (in.kind == Scorer::TOKENS) {
    for (int64_t r = 0; r < rows; r++) {
      for (int64_t c = 0; c < chunks; c++) {
        float best = NEVER;
        for (int64_t j = (in.first + c) * in.chunk; j < (in.first + c + 1) * in.chunk; j++) {
          best = std::max(best, all[j / BLOCK * each + r * BLOCK + j % BLOCK]);
        }
        scores[c] += best;
      }
    }
    return;
  }
  std::fill_n(mass, (blocks + 1) * BLOCK, 0.0f);
  for (int64_t r = 0; r < rows; r++) {
    float high = NEVER;
    for (int64_t b = 0; b < blocks; b++) {
      for (int64_t j = 0; j < BLOCK; j++) high = std::max(high, all[b * each + r * BLOCK + j]);
    }
    vec total = {};
    for (int64_t b = 0; b < blocks; b++) {
      for (float *p = all + b * each + r * BLOCK, *last = p + BLOCK; p < last; p += LANES) {
        const vec x = exponential(load(p) - high);
        store(p, x);
        total += x;
      }
    }
    float sum = 0.0f;
    for (int i = 0; i < LANES; i++) sum += total[i];
    for (int64_t b = 0; b < blocks; b++) {
      const float *p = all + b * each + r * BLOCK;
      float *to = mass + b * BLOCK;
      for (int64_t j = 0; j < BLOCK; j += LANES) store(to + j, load(to + j) + load(p + j) / sum);
    }
  }
  for (int64_t c = 0; c < chunks; c++) {
    for (int64_t j = (in.first + c) * in.chunk; j < (in.first + c + 1) * in.chunk; j++) {
      if (in.kind == Scorer::ATTENTION) {
        scores[c] += mass[j];
        continue;
      }
      for (int64_t i = std::max<int64_t>(0, j - POOL / 2); i <= std::min(end - 1, j + POOL / 2); i++) scores[c] += mass[i];
    }
  }
}

// Rows [from, from + count) of a text, which become rows [to, to + count) of its copy.
struct Piece {
  int64_t from, to, count;
};

// Copies rows of keys that are stored column-wise, dimension by dimension, because dimensions are far apart.
template <typename E>
void copy_keys(const Text &text, const Text &copy, int64_t d, const std::vector<Piece> &pieces) {
  const auto *k = static_cast<const E *>(text.k);
  auto *k_to = static_cast<E *>(copy.k);
  const bool turned = text.k_row == 1 && copy.k_row == 1;
  for (int64_t i = 0; i < d; i++) {
    const E *own = k + i * text.k_dim;
    E *to = k_to + i * copy.k_dim;
    for (const Piece &p : pieces) {
      if (turned) {
        std::copy_n(own + p.from, p.count, to + p.to);
      } else {
        for (int64_t j = 0; j < p.count; j++) to[(p.to + j) * copy.k_row] = own[(p.from + j) * text.k_row];
      }
    }
  }
}

// The same to fewer bytes: a row is rounded as one.
template <typename E>
void pack_keys(const Text &text, const Text &copy, int64_t d, const std::vector<Piece> &pieces) {
  constexpr int64_t TOGETHER = 64;  // rows, of which a dimension's are some cache lines
  static thread_local Scratch scratch;
  float *rows = scratch.of(TOGETHER * d);
  const auto *k = static_cast<const E *>(text.k);
  for (const Piece &p : pieces) {
    for (int64_t a = 0; a < p.count; a += TOGETHER) {
      const int64_t count = std::min(TOGETHER, p.count - a);
      for (int64_t i = 0; i < d; i++) {
        const E *own = k + i * text.k_dim + (p.from + a) * text.k_row;
        for (int64_t j = 0; j < count; j++) rows[j * d + i] = number(own + j * text.k_row);
      }
      for (int64_t j = 0; j < count; j++) {
        const int64_t row = p.to + a + j;
        as_stored(copy.k, copy.format, [&](auto *to) {
          pack(rows + j * d, d, to + row * copy.k_row, copy.k_dim, copy.k_scale + row);
        });
      }
    }
  }
}

// E: what the text's numbers are, float or Brief.
template <typename E>
void copy_pieces(const Text &text, const Text &copy, int64_t d, const std::vector<Piece> &pieces) {
  (copy.format == text.format ? copy_keys<E> : pack_keys<E>)(text, copy, d, pieces);
  static thread_local Scratch scratch;
  float *row_of_v = scratch.of(d);
  const auto *v = static_cast<const E *>(text.v);
  for (const Piece &p : pieces) {
    for (int64_t j = 0; j < p.count; j++) {
      const int64_t row = p.to + j;
      for (int64_t i = 0; i < d; i++) row_of_v[i] = number(v + (p.from + j) * text.v_row + i);
      as_stored(copy.v, copy.format, [&](auto *to) { pack(row_of_v, d, to + row * copy.v_row, 1, copy.v_scale + row); });
    }
  }
}

void copy_pieces(const Text &text, const Text &copy, int64_t d, const std::vector<Piece> &pieces) {
  (text.format == Kept::BFLOAT16 ? copy_pieces<Brief> : copy_pieces<float>)(text, copy, d, pieces);
}

// Updates held (count,), the chunk in each place of a copy, to the chosen chunks. Chunks that are there already stay in their
// places; place(chunk, where) is called for the others.
template <typename Place>
void replace_chunks(const int64_t *chosen, int64_t *held, int64_t count, const Place &place) {
  static thread_local std::vector<int64_t> sorted, fresh;
  sorted.assign(held, held + count);
  std::sort(sorted.begin(), sorted.end());
  fresh.clear();
  for (int64_t i = 0; i < count; i++) {
    if (!std::binary_search(sorted.begin(), sorted.end(), chosen[i])) fresh.push_back(chosen[i]);
  }
  for (int64_t i = 0, next = 0; i < count; i++) {
    if (std::binary_search(chosen, chosen + count, held[i])) continue;
    held[i] = fresh[static_cast<std::size_t>(next++)];
    place(held[i], i);
  }
}

template <typename E>
void summarise_dimension(const E *k, int64_t row, int64_t chunk, const Summaries *out, int64_t at, int64_t from, int64_t to) {
  for (int64_t c = from; c < to; c++) {
    const E *own = k + c * chunk * row;
    float largest = number(own), smallest = largest, sum = 0.0f;
    for (int64_t j = 0; j < chunk; j++) {
      const float x = number(own + j * row);
      largest = std::max(largest, x);
      smallest = std::min(smallest, x);
      sum += x;
    }
    if (out->largest) out->largest[at + c] = largest;
    if (out->smallest) out->smallest[at + c] = smallest;
    if (out->mean) out->mean[at + c] = sum / static_cast<float>(chunk);
  }
}

}  // namespace

Code longdraft_summarise(const KeysValues *kv, int64_t slot, int64_t layers, int64_t heads, int64_t d, int64_t chunk,
                         const Summaries *out, int64_t from, int64_t to, int threads) try {
  share_out(threads, layers * heads, [&](int64_t item) {
    const int64_t layer = item / heads, head = item % heads;
    const Text text = text_of(of_layer(*kv, layer), slot, head);
    const int64_t place = layer * out->layer + head * out->head;
    for (int64_t i = 0; i < d; i++) {
      as_stored(text.k, text.format, [&](auto *k) {
        summarise_dimension(k + i * text.k_dim, text.k_row, chunk, out, place + i * out->dim, from, to);
      });
    }
  });
  return DONE;
} CATCH_NO_MEMORY

Code longdraft_choose(const Choice *choice, const float *queries, int64_t *chosen, int threads) try {
  const Choice &in = *choice;
  const int64_t chunks = in.behind - in.first, rows = in.group * in.rows;
  share_out(threads, in.layers * in.heads, [&](int64_t item) {
    static thread_local Scratch own, of_keys;
    const int64_t of_scores = Scratch::whole_lines(chunks), of_order = Scratch::whole_lines(2 * chunks);
    float *scores = own.of(of_scores + of_order + 2 * rows * (BLOCK + in.d));
    auto *order = reinterpret_cast<int64_t *>(scores + of_scores);
    const float *q = queries + item * rows * in.d;
    if (in.kind >= Scorer::TOKENS) {
      score_by_keys(in, q, item / in.heads, item % in.heads, scores, of_keys);
    } else {
      score_chunks(in, q, item / in.heads, item % in.heads, scores, scores + of_scores + of_order);
    }
    for (int64_t i = 0; i < chunks; i++) order[i] = i;
    // NaN ranks last; otherwise the comparison would not be an order.
    const auto before = [&](int64_t a, int64_t b) {
      const bool fine = scores[a] == scores[a], other = scores[b] == scores[b];
      if (fine != other) return fine;
      return fine && scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
    };
    std::nth_element(order, order + in.count, order + chunks, before);
    std::sort(order, order + in.count);
    for (int64_t i = 0; i < in.count; i++) chosen[item * in.count + i] = in.first + order[i];
  });
  return DONE;
} CATCH_NO_MEMORY

Code longdraft_copy_view(const KeysValues *kv, const KeysValues *copy, int64_t slot, int64_t layers, int64_t heads, int64_t d,
                         const int64_t *chosen, int64_t *held, int64_t count, int64_t chunk, int64_t sink, int64_t window,
                         int64_t end, int threads) try {
  share_out(threads, layers * heads, [&](int64_t item) {
    static thread_local std::vector<Piece> pieces;
    const int64_t layer = item / heads, head = item % heads;
    pieces.clear();
    if (!count || held[item * count] < 0) pieces.push_back({0, 0, sink});
    replace_chunks(chosen + item * count, held + item * count, count, [&](int64_t which, int64_t where) {
      pieces.push_back({which * chunk, sink + where * chunk, chunk});
    });
    pieces.push_back({window, sink + count * chunk, end - window});
    copy_pieces(text_of(of_layer(*kv, layer), slot, head), text_of(of_layer(*copy, layer), slot, head), d, pieces);
  });
  return DONE;
} CATCH_NO_MEMORY

Code longdraft_copy_rows(const KeysValues *kv, const KeysValues *copy, int64_t slot, int64_t layers, int64_t heads, int64_t d,
                         int64_t from, int64_t to, int64_t count, int threads) try {
  share_out(threads, layers * heads, [&](int64_t item) {
    const int64_t layer = item / heads, head = item % heads;
    const Text text = text_of(of_layer(*kv, layer), slot, head), own = text_of(of_layer(*copy, layer), slot, head);
    copy_pieces(text, own, d, {{from, to, count}});
  });
  return DONE;
} CATCH_NO_MEMORY
