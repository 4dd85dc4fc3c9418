// Attention of a few rows to a long prefix: keys and values are read once for all rows of a group of query heads.
//
// Keys are processed in blocks: scores, a running softmax, the weighted values; a block's scores stay in the caches. Threads
// work on segments of the text, which are merged in order by their maxima and sums. A row of a tree is summed as if the keys
// on its path were consecutive, as in plain decoding, so its result has the same bits as plain decoding.
#include "blocks.h"
#include "kernels.h"
#include "threads.h"

using std::int64_t;

namespace {

// For each row of a tree behind a prefix, the keys that it sees, in the order of its path.
struct Paths {
  std::int32_t *keys;   // (rows, width)
  std::int32_t *depth;  // (rows,) how many
  int64_t rows, width, deepest;

  static int64_t size(int64_t rows, int64_t width) { return rows * (width + 1); }

  Paths(std::int32_t *place, const std::uint8_t *mask, int64_t rows_, int64_t width_)
      : keys(place), depth(place + rows_ * width_), rows(rows_), width(width_), deepest(0) {
    for (int64_t t = 0; t < rows; t++) {
      std::int32_t count = 0;
      for (int64_t j = 0; j < width; j++) {
        if (mask[t * width + j]) keys[t * width + count++] = static_cast<std::int32_t>(j);
      }
      depth[t] = count;
      deepest = std::max<int64_t>(deepest, count);
    }
  }
};

// Memory for the tail: scores of its keys in storage order, block by block; the transposed keys; one block of a row's scores in
// path order; weights of the tree's keys in storage order.
int64_t tail_size(int64_t rows, int64_t d, int64_t width) {
  return BLOCK * (padded(rows) * ((BLOCK + width + BLOCK - 1) / BLOCK + 2) + d);
}

#if defined(LONGDRAFT_AMX)
// Adds the values of the block of keys from a on: `prefix` of the prefix, from `unseen` on, and each row's nodes from rank `first`
// on, which lie behind key `nodes`. A row's keys are added in the groups that they will be in when its path is committed.
void mix_tail(const Queries &in, const Text &text, int64_t nodes, int64_t a, int64_t unseen, int64_t prefix, const Paths &paths,
              int64_t first, float *p) {
  const int64_t shared = prefix / brief::DEEP * brief::DEEP, heads = in.rows / paths.rows;
  if (unseen < shared) mix_block(in, text, a, unseen, shared, p);
  static thread_local Scratch scratch;
  float *own = scratch.of(padded(heads) * (in.d + BLOCK)), *weights = own + padded(heads) * in.d;
  const Brief *v = static_cast<Brief *>(text.v);
  const brief::Room room(heads, BLOCK, in.d);
  for (int64_t t = 0; t < paths.rows; t++) {
    const int64_t end = std::min(BLOCK, prefix + std::max<int64_t>(0, paths.depth[t] - first)) - shared;
    if (end <= 0) continue;
    const int64_t depth = brief::whole(end, brief::DEEP);
    const auto row_of = [&](int64_t i) -> const Brief * {
      const int64_t place = shared + i;
      if (i >= end || place < unseen) return nullptr;
      const int64_t key = place < prefix ? a + place : nodes + paths.keys[t * paths.width + first + place - prefix];
      return v + key * text.v_row;
    };
    brief::pair_rows(row_of, depth, in.d, in.d, 0, room.right);
    for (int64_t h = 0; h < heads; h++) {
      const int64_t r = h * paths.rows + t;
      std::copy_n(in.part.out + r * in.d, in.d, own + h * in.d);
      std::copy_n(p + r * BLOCK + shared, end, weights + h * BLOCK);
      std::fill_n(weights + h * BLOCK + end, depth - end, 0.0f);
    }
    brief::round_rows(weights, BLOCK, heads, depth, 1, depth, room.left);
    brief::multiply(room.left, padded(heads), depth, room.right, in.d, own, in.d, true);
    for (int64_t h = 0; h < heads; h++) std::copy_n(own + h * in.d, in.d, in.part.out + (h * paths.rows + t) * in.d);
  }
}
#endif

// The tail of the text: the last `before` keys of the prefix, from `start` on, which fill no block, and the tree behind them.
// Row r sees these keys of the prefix and the tree's keys on the path of its node, r % paths.rows, from rank
// begins[r % paths.rows] on. Its scores are gathered into blocks as if the path were committed already. Values are summed in
// storage order; those that the row does not see have weight 0, which changes no sum. Only blocks [from, to) are computed.
void attend_tail(const Queries &in, const Text &text, int64_t start, int64_t before, const Paths &paths,
                 const std::int32_t *begins, int64_t from, int64_t to, float *room) {
  const int64_t all = before + paths.width, each = padded(in.rows) * BLOCK;
  float *raw = room, *own = raw + (all + BLOCK - 1) / BLOCK * each, *weights = own + each, *turned = weights + each;
  for (int64_t a = 0; a < all; a += BLOCK) {
    score_block(in, text, start + a, std::min(BLOCK, all - a), raw + a / BLOCK * each, turned);
  }
  const auto at = [=](int64_t r, int64_t key) -> float { return raw[key / BLOCK * each + r * BLOCK + key % BLOCK]; };
  for (int64_t a = from; a < std::min(to, start + before + paths.deepest); a += BLOCK) {
    // The block's keys [a, a + BLOCK) begin with `prefix` keys of the prefix; nodes from rank `first` on follow.
    const int64_t prefix = a == start ? before : 0, first = a == start ? 0 : a - start - before;
    const int64_t keys = std::min(BLOCK, prefix + paths.deepest - first);
    for (int64_t r = 0; r < in.rows; r++) {
      const int64_t t = r % paths.rows;
      float *s = own + r * BLOCK;
      std::copy_n(raw + r * BLOCK, prefix, s);
      const int64_t end = std::min(BLOCK, prefix + std::max<int64_t>(0, paths.depth[t] - first));
      for (int64_t j = prefix; j < end; j++) s[j] = at(r, before + paths.keys[t * paths.width + first + j - prefix]);
      for (int64_t j = end; j < keys; j++) s[j] = NEVER;
    }
    hide_before(own, in.rows, a, keys, begins, paths.rows);
    soften(own, in.rows, keys, in.d, in.part);
    const int64_t unseen = std::min(prefix, std::max<int64_t>(0, in.begin - a));
#if defined(LONGDRAFT_AMX)
    if (in.brief) {
      mix_tail(in, text, start + before, a, unseen, prefix, paths, first, own);
      continue;
    }
#endif
    if (unseen < prefix) mix_block(in, text, a, unseen, prefix, own);
    for (int64_t piece = 0; piece < paths.width; piece += BLOCK) {
      const int64_t count = std::min(BLOCK, paths.width - piece);
      for (int64_t r = 0; r < in.rows; r++) {
        const int64_t t = r % paths.rows;
        std::fill_n(weights + r * BLOCK, count, 0.0f);
        for (int64_t rank = first; rank < std::min<int64_t>(paths.depth[t], first + BLOCK - prefix); rank++) {
          const int64_t key = paths.keys[t * paths.width + rank] - piece;
          if (key >= 0 && key < count) weights[r * BLOCK + key] = own[r * BLOCK + prefix + rank - first];
        }
      }
      mix_block(in, text, start + before + piece, 0, count, weights);
    }
  }
}

// The first of n keys that any of the rows sees.
int64_t first_seen(const std::int32_t *begins, int64_t rows, int64_t n) {
  return begins ? std::clamp<int64_t>(*std::min_element(begins, begins + rows), 0, n - 1) : 0;
}

}  // namespace

Code longdraft_attend(const float *q, const KeysValues *kv, int64_t slot, int64_t heads, int64_t rows, int64_t d, int64_t n,
                      const std::uint8_t *mask, int64_t mask_rows, int64_t width, const std::int32_t *begins,
                      const Scoring *scoring, float *out, int threads) try {
  static thread_local Scratch of_caller;
  if (!mask) width = 0;
  const bool brief = is_brief(*kv);
  const int64_t prefix = n - width, tail = width ? prefix / BLOCK * BLOCK : n;  // the tail: attend_tail's
  const int64_t begin = first_seen(begins, mask_rows, n), before = begin / SEGMENT;  // segments that no row sees
  const int64_t segments = (n + SEGMENT - 1) / SEGMENT - before, size = partial_size(rows, d);
  const int64_t of_paths = Scratch::whole_lines(Paths::size(mask_rows, width)), of_q = scaled_size(rows, d, brief);
  float *scaled = of_caller.of(of_paths + heads * (of_q + segments * size)), *partials = scaled + heads * of_q + of_paths;
  for (int64_t h = 0; h < heads; h++) scale_queries(q + h * rows * d, rows, d, scoring->scale, brief, scaled + h * of_q);
  const Paths paths(reinterpret_cast<std::int32_t *>(scaled + heads * of_q), mask, width ? mask_rows : 0, width);
  share_out(threads, heads * segments, [&](int64_t item) {
    static thread_local Scratch own;
    const int64_t head = item / segments, segment = before + item % segments, to = std::min(n, (segment + 1) * SEGMENT);
    const int64_t from = std::max(segment * SEGMENT, begin / BLOCK * BLOCK);
    float *room = own.of(std::max(BLOCK * (padded(rows) + d), tail_size(rows, d, width)));
    const Partial part = empty_partial(partials + item * size, rows, d);
    const Queries in{scaled + head * of_q, rows, d, part, scoring->cap, begin, brief};
    [[maybe_unused]] const tiles::Shapes shapes;
    const Text text = text_of(*kv, slot, head);
    for (int64_t a = from; a < std::min(to, tail); a += BLOCK) {
      attend_block(in, text, a, std::min(BLOCK, to - a), room, room + BLOCK * padded(rows),
                   [=](float *s, int64_t at, int64_t keys) { hide_before(s, rows, at, keys, begins, mask_rows); });
    }
    if (to > tail) attend_tail(in, text, tail, prefix - tail, paths, begins, std::max(from, tail), to, room);
  });
  share_out(heads * segments * rows * d > 1 << 16 ? threads : 1, heads, [&](int64_t head) {
    const auto part = [&](int64_t segment) { return partial_at(partials + (head * segments + segment) * size, rows, d); };
    for (int64_t segment = 1; segment < segments; segment++) join(part(0), part(segment), rows, d);
    const float *sinks = scoring->sinks ? scoring->sinks + head * (rows / mask_rows) : nullptr;
    divide(part(0), rows, d, out + head * rows * d, sinks, mask_rows);
  });
  return DONE;
} CATCH_NO_MEMORY

Code longdraft_attend_chunk(const float *q, const KeysValues *kv, int64_t slot, int64_t heads, int64_t group, int64_t rows,
                            int64_t d, int64_t n, const std::int32_t *begins, const Scoring *scoring, float *out,
                            int threads) try {
  // Rows whose scores fit the second-level cache together with a block; with tiles more, because a block is paired for them.
  constexpr int64_t TOGETHER = (TILES ? 32 : 16) * ROWS;
  const bool brief = is_brief(*kv);
  const int64_t parts = (rows + TOGETHER - 1) / TOGETHER;
  share_out(threads, heads * parts, [&](int64_t item) {
    static thread_local Scratch own;
    // The last rows see most keys. They start first, so that no thread is left working alone at the end.
    const int64_t head = item % heads, first = (parts - 1 - item / heads) * TOGETHER;
    const int64_t count = std::min(TOGETHER, rows - first), before = n - rows + first;
    const int64_t size = partial_size(TOGETHER, d), of_q = scaled_size(TOGETHER, d, brief);
    float *s = own.of(BLOCK * TOGETHER + BLOCK * d + of_q + 2 * size);
    float *turned = s + BLOCK * TOGETHER, *scaled = turned + BLOCK * d, *places = scaled + of_q;
    scale_queries(q + (head * rows + first) * d, count, d, scoring->scale, brief, scaled);
    [[maybe_unused]] const tiles::Shapes shapes;
    const Text text = text_of(*kv, slot, head / group);
    const std::int32_t *own_begins = begins ? begins + first : nullptr;
    const int64_t begin = first_seen(own_begins, count, before + count), start = begin / SEGMENT * SEGMENT;
    const auto hide = [=](float *scores, int64_t a, int64_t keys) {
      hide_before(scores, count, a, keys, own_begins, count);
      for (int64_t r = 0; r < count; r++) {  // row r sees keys up to before + r
        for (int64_t j = std::max(a, before + r + 1); j < a + keys; j++) scores[r * BLOCK + j - a] = NEVER;
      }
    };
    const Partial all = empty_partial(places, count, d);
    for (int64_t from = start; from < before + count; from += SEGMENT) {
      const Partial part = from > start ? empty_partial(places + size, count, d) : all;
      for (int64_t a = std::max(from, begin / BLOCK * BLOCK); a < std::min(before + count, from + SEGMENT); a += BLOCK) {
        const int64_t keys = std::min(BLOCK, before + count - a);
        attend_block({scaled, count, d, part, scoring->cap, begin, brief}, text, a, keys, s, turned, hide);
      }
      if (from > start) join(all, part, count, d);
    }
    divide(all, count, d, out + (head * rows + first) * d, scoring->sinks ? scoring->sinks + head : nullptr, count);
  });
  return DONE;
} CATCH_NO_MEMORY
