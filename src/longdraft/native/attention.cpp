// Attention to a long KV cache (attention.h has its steps). In decoding and verification, K and V are read once for all tokens and all
// query heads of a KV head; threads work on segments of the cache, which are merged in order (flash-decoding). In prefill, threads
// work on chunks of queries.
//
// A token of a tree accumulates as if the keys on its path were consecutive, so it has the bits of plain decoding.
#include "attention.h"
#include "kernels.h"
#include "threads.h"

using std::int64_t;

namespace {

// For each token of a tree the tree keys that it sees (its path), from the root on.
struct TreePaths {
  std::int32_t *keys;   // (rows, width): indices of the path's keys among the tree's keys
  std::int32_t *depths;  // (rows,): number of the path's keys
  int64_t rows, width, max_depth;

  static int64_t size(int64_t rows, int64_t width) { return rows * (width + 1); }

  TreePaths(std::int32_t *memory, const std::uint8_t *mask, int64_t rows_, int64_t width_)
      : keys(memory), depths(memory + rows_ * width_), rows(rows_), width(width_), max_depth(0) {
    for (int64_t t = 0; t < rows; t++) {
      std::int32_t count = 0;
      for (int64_t j = 0; j < width; j++) {
        if (mask[t * width + j]) keys[t * width + count++] = static_cast<std::int32_t>(j);
      }
      depths[t] = count;
      max_depth = std::max<int64_t>(max_depth, count);
    }
  }
};

// Number of floats that attend_tail needs: blocks of scores in storage order; a block of scores in path order; a block of weights in
// storage order; transposed keys.
int64_t tail_size(int64_t rows, int64_t d, int64_t width) {
  return BLOCK * (round_up_rows(rows) * ((BLOCK + width + BLOCK - 1) / BLOCK + 2) + d);
}

#if defined(LONGDRAFT_AMX)
// part.out += p times the values of the block from key a on: keys [n_unseen, prefix) of the prefix, then each row's tree keys from
// path index `first` on; tree key 0 is key `tree_start`. Keys are added in the tiles that they will be in once their path is committed.
void accumulate_pv_tail(const AttentionInput &in, const KVHead &head_kv, int64_t tree_start, int64_t a, int64_t n_unseen, int64_t prefix,
                        const TreePaths &paths, int64_t first, float *p) {
  const int64_t n_shared = prefix / bf16::TILE_DEPTH * bf16::TILE_DEPTH, heads = in.rows / paths.rows;
  if (n_unseen < n_shared) accumulate_pv_block(in, head_kv, a, n_unseen, n_shared, p);
  static thread_local Scratch scratch;
  float *token_out = scratch.get(round_up_rows(heads) * (in.d + BLOCK)), *weights = token_out + round_up_rows(heads) * in.d;
  const BFloat16 *v = static_cast<BFloat16 *>(head_kv.v);
  const bf16::Operands operands(heads, BLOCK, in.d);
  for (int64_t t = 0; t < paths.rows; t++) {
    const int64_t end = std::min(BLOCK, prefix + std::max<int64_t>(0, paths.depths[t] - first)) - n_shared;
    if (end <= 0) continue;
    const int64_t depth = bf16::round_up(end, bf16::TILE_DEPTH);
    const auto row_ptr = [&](int64_t i) -> const BFloat16 * {
      const int64_t position = n_shared + i;
      if (i >= end || position < n_unseen) return nullptr;
      const int64_t key = position < prefix ? a + position : tree_start + paths.keys[t * paths.width + first + position - prefix];
      return v + key * head_kv.v_row;
    };
    bf16::interleave_row_pairs(row_ptr, depth, in.d, in.d, 0, operands.rhs);
    for (int64_t h = 0; h < heads; h++) {
      const int64_t r = h * paths.rows + t;
      std::copy_n(in.part.out + r * in.d, in.d, token_out + h * in.d);
      std::copy_n(p + r * BLOCK + n_shared, end, weights + h * BLOCK);
      std::fill_n(weights + h * BLOCK + end, depth - end, 0.0f);
    }
    bf16::round_matrix(weights, BLOCK, heads, depth, 1, depth, operands.lhs);
    bf16::multiply(operands.lhs, round_up_rows(heads), depth, operands.rhs, in.d, token_out, in.d, true);
    for (int64_t h = 0; h < heads; h++) std::copy_n(token_out + h * in.d, in.d, in.part.out + (h * paths.rows + t) * in.d);
  }
}
#endif

// Attends to the tail: the last `before` keys of the prefix, from key `start` on, which do not fill a block, and the tree's keys.
// Row r (token r % paths.rows) sees these keys and the tree keys on its path, from rank window_start on. Its scores are gathered into
// blocks as if the path were committed. Values are accumulated in storage order: keys that a row does not see get weight 0, which
// changes no bit. Computes blocks [from, to) only.
void attend_tail(const AttentionInput &in, const KVHead &head_kv, int64_t start, int64_t before, const TreePaths &paths,
                 const std::int32_t *window_start, int64_t from, int64_t to, float *buffer) {
  const int64_t tail_len = before + paths.width, block_size = round_up_rows(in.rows) * BLOCK;
  float *storage_scores = buffer, *path_scores = storage_scores + (tail_len + BLOCK - 1) / BLOCK * block_size, *weights = path_scores + block_size,
        *kt = weights + block_size;
  for (int64_t a = 0; a < tail_len; a += BLOCK) {
    score_block(in, head_kv, start + a, std::min(BLOCK, tail_len - a), storage_scores + a / BLOCK * block_size, kt);
  }
  const auto score_of = [=](int64_t r, int64_t key) -> float { return storage_scores[key / BLOCK * block_size + r * BLOCK + key % BLOCK]; };
  for (int64_t a = from; a < std::min(to, start + before + paths.max_depth); a += BLOCK) {
    // The block [a, a + BLOCK): `prefix` keys of the prefix, then keys of the path from its index `first` on.
    const int64_t prefix = a == start ? before : 0, first = a == start ? 0 : a - start - before;
    const int64_t keys = std::min(BLOCK, prefix + paths.max_depth - first);
    for (int64_t r = 0; r < in.rows; r++) {
      const int64_t t = r % paths.rows;
      float *s = path_scores + r * BLOCK;
      std::copy_n(storage_scores + r * BLOCK, prefix, s);
      const int64_t end = std::min(BLOCK, prefix + std::max<int64_t>(0, paths.depths[t] - first));
      for (int64_t j = prefix; j < end; j++) s[j] = score_of(r, before + paths.keys[t * paths.width + first + j - prefix]);
      for (int64_t j = end; j < keys; j++) s[j] = MASKED;
    }
    mask_before_window(path_scores, in.rows, a, keys, window_start, paths.rows);
    online_softmax_update(path_scores, in.rows, keys, in.d, in.part);
    const int64_t n_unseen = std::min(prefix, std::max<int64_t>(0, in.window_begin - a));
#if defined(LONGDRAFT_AMX)
    if (in.bf16) {
      accumulate_pv_tail(in, head_kv, start + before, a, n_unseen, prefix, paths, first, path_scores);
      continue;
    }
#endif
    if (n_unseen < prefix) accumulate_pv_block(in, head_kv, a, n_unseen, prefix, path_scores);
    for (int64_t tree_start = 0; tree_start < paths.width; tree_start += BLOCK) {
      const int64_t count = std::min(BLOCK, paths.width - tree_start);
      for (int64_t r = 0; r < in.rows; r++) {
        const int64_t t = r % paths.rows;
        std::fill_n(weights + r * BLOCK, count, 0.0f);
        for (int64_t rank = first; rank < std::min<int64_t>(paths.depths[t], first + BLOCK - prefix); rank++) {
          const int64_t key = paths.keys[t * paths.width + rank] - tree_start;
          if (key >= 0 && key < count) weights[r * BLOCK + key] = path_scores[r * BLOCK + prefix + rank - first];
        }
      }
      accumulate_pv_block(in, head_kv, start + before + tree_start, 0, count, weights);
    }
  }
}

// Index of the first of n keys that at least one row sees.
int64_t first_seen(const std::int32_t *window_start, int64_t rows, int64_t n) {
  return window_start ? std::clamp<int64_t>(*std::min_element(window_start, window_start + rows), 0, n - 1) : 0;
}

}  // namespace

Status longdraft_attend(const float *q, const KVCache *kv, int64_t slot, int64_t n_kv_heads, int64_t rows, int64_t d, int64_t n_kv,
                      const std::uint8_t *mask, int64_t mask_rows, int64_t mask_width, const std::int32_t *window_start,
                      const SoftmaxParams *softmax, float *out, int threads) try {
  static thread_local Scratch caller_scratch;
  if (!mask) mask_width = 0;
  const bool bf16 = use_amx_bf16(*kv);
  const int64_t prefix = n_kv - mask_width, tail = mask_width ? prefix / BLOCK * BLOCK : n_kv;  // attend_tail computes keys from `tail` on
  // Segments before the windows of all rows are skipped.
  const int64_t window_begin = first_seen(window_start, mask_rows, n_kv), first_segment = window_begin / SEGMENT;
  const int64_t n_segments = (n_kv + SEGMENT - 1) / SEGMENT - first_segment, size = partial_size(rows, d);
  const int64_t paths_size = Scratch::round_up_to_line(TreePaths::size(mask_rows, mask_width)), q_size = scaled_queries_size(rows, d, bf16);
  float *scaled = caller_scratch.get(paths_size + n_kv_heads * (q_size + n_segments * size)), *partials = scaled + n_kv_heads * q_size + paths_size;
  for (int64_t h = 0; h < n_kv_heads; h++) scale_queries(q + h * rows * d, rows, d, softmax->scale, bf16, scaled + h * q_size);
  const TreePaths paths(reinterpret_cast<std::int32_t *>(scaled + n_kv_heads * q_size), mask, mask_width ? mask_rows : 0, mask_width);
  parallel_for(threads, n_kv_heads * n_segments, [&](int64_t item) {
    static thread_local Scratch scratch;
    const int64_t head = item / n_segments, segment = first_segment + item % n_segments, to = std::min(n_kv, (segment + 1) * SEGMENT);
    const int64_t from = std::max(segment * SEGMENT, window_begin / BLOCK * BLOCK);
    float *buffer = scratch.get(std::max(BLOCK * (round_up_rows(rows) + d), tail_size(rows, d, mask_width)));
    const PartialAttention part = empty_partial(partials + item * size, rows, d);
    const AttentionInput in{scaled + head * q_size, rows, d, part, softmax->softcap, window_begin, bf16};
    [[maybe_unused]] const amx::TileConfig config;
    const KVHead head_kv = kv_head(*kv, slot, head);
    for (int64_t a = from; a < std::min(to, tail); a += BLOCK) {
      attend_block(in, head_kv, a, std::min(BLOCK, to - a), buffer, buffer + BLOCK * round_up_rows(rows),
                   [=](float *s, int64_t first, int64_t keys) { mask_before_window(s, rows, first, keys, window_start, mask_rows); });
    }
    if (to > tail) attend_tail(in, head_kv, tail, prefix - tail, paths, window_start, std::max(from, tail), to, buffer);
  });
  parallel_for(n_kv_heads * n_segments * rows * d > 1 << 16 ? threads : 1, n_kv_heads, [&](int64_t head) {
    const auto part = [&](int64_t segment) { return partial_at(partials + (head * n_segments + segment) * size, rows, d); };
    for (int64_t segment = 1; segment < n_segments; segment++) merge_partials(part(0), part(segment), rows, d);
    const float *sinks = softmax->sinks ? softmax->sinks + head * (rows / mask_rows) : nullptr;
    normalize(part(0), rows, d, out + head * rows * d, sinks, mask_rows);
  });
  return OK;
} CATCH_EXCEPTIONS

Status longdraft_attend_prefill(const float *q, const KVCache *kv, int64_t slot, int64_t n_heads, int64_t group_size, int64_t rows,
                            int64_t d, int64_t n_kv, const std::int32_t *window_start, const SoftmaxParams *softmax, float *out,
                            int threads) try {
  // Queries of a work item: scores and a block fit the L2 cache. More with AMX, which interleaves each block once for all.
  constexpr int64_t ITEM_ROWS = (HAVE_AMX ? 32 : 16) * TILE_ROWS;
  const bool bf16 = use_amx_bf16(*kv);
  const int64_t items_per_head = (rows + ITEM_ROWS - 1) / ITEM_ROWS;
  parallel_for(threads, n_heads * items_per_head, [&](int64_t item) {
    static thread_local Scratch scratch;
    // The last queries see the most keys, so they start first: else a thread would work on them alone at the end.
    const int64_t head = item % n_heads, first = (items_per_head - 1 - item / n_heads) * ITEM_ROWS;
    const int64_t count = std::min(ITEM_ROWS, rows - first), before = n_kv - rows + first;
    const int64_t size = partial_size(ITEM_ROWS, d), q_size = scaled_queries_size(ITEM_ROWS, d, bf16);
    float *s = scratch.get(BLOCK * ITEM_ROWS + BLOCK * d + q_size + 2 * size);
    float *kt = s + BLOCK * ITEM_ROWS, *scaled = kt + BLOCK * d, *partials = scaled + q_size;
    scale_queries(q + (head * rows + first) * d, count, d, softmax->scale, bf16, scaled);
    [[maybe_unused]] const amx::TileConfig config;
    const KVHead head_kv = kv_head(*kv, slot, head / group_size);
    const std::int32_t *item_window_start = window_start ? window_start + first : nullptr;
    const int64_t window_begin = first_seen(item_window_start, count, before + count), start = window_begin / SEGMENT * SEGMENT;
    const auto causal_mask = [=](float *scores, int64_t a, int64_t keys) {
      mask_before_window(scores, count, a, keys, item_window_start, count);
      for (int64_t r = 0; r < count; r++) {  // causal: row r sees keys up to before + r
        for (int64_t j = std::max(a, before + r + 1); j < a + keys; j++) scores[r * BLOCK + j - a] = MASKED;
      }
    };
    const PartialAttention all = empty_partial(partials, count, d);
    for (int64_t from = start; from < before + count; from += SEGMENT) {
      const PartialAttention part = from > start ? empty_partial(partials + size, count, d) : all;
      for (int64_t a = std::max(from, window_begin / BLOCK * BLOCK); a < std::min(before + count, from + SEGMENT); a += BLOCK) {
        const int64_t keys = std::min(BLOCK, before + count - a);
        attend_block({scaled, count, d, part, softmax->softcap, window_begin, bf16}, head_kv, a, keys, s, kt, causal_mask);
      }
      if (from > start) merge_partials(all, part, count, d);
    }
    normalize(all, count, d, out + (head * rows + first) * d, softmax->sinks ? softmax->sinks + head : nullptr, count);
  });
  return OK;
} CATCH_EXCEPTIONS
