// Attention to a long KV cache, by the steps of attention.h. In decoding and verification, K and V are read once for all tokens and query
// heads of a KV head; threads work on segments of the cache, which are merged in order (flash-decoding). In prefill, they work on queries.
//
// In verification, keys lie in the cache ("storage order") as
//     | whole blocks of the prefix | rest of the prefix | keys of the tree |
//                                  |<--------------- tail --------------->|
// A tree token sees the prefix and the tree keys on its path. It gets the bits of plain decoding, because its keys are accumulated in
// "path order": in the blocks where they would lie if the path were committed, that is, if it followed the prefix without gaps.
#include "attention.h"
#include "threads.h"

namespace {

// The path of each tree token: the tree keys that it sees, from the root on.
struct TreePaths {
  std::int32_t *keys;    // (n_tokens, n_keys): indices of a path's keys among the tree's keys
  std::int32_t *depths;  // (n_tokens,): number of a path's keys
  int64_t n_tokens, n_keys, max_depth;

  static int64_t size(int64_t n_tokens, int64_t n_keys) { return n_tokens * (n_keys + 1); }

  // mask (n_tokens, n_keys): 1 if a token sees a key of the tree.
  TreePaths(std::int32_t *memory, const std::uint8_t *mask, int64_t n_tokens_, int64_t n_keys_)
      : keys(memory), depths(memory + n_tokens_ * n_keys_), n_tokens(n_tokens_), n_keys(n_keys_), max_depth(0) {
    for (int64_t t = 0; t < n_tokens; t++) {
      std::int32_t depth = 0;
      for (int64_t j = 0; j < n_keys; j++) {
        if (mask[t * n_keys + j]) keys[t * n_keys + depth++] = static_cast<std::int32_t>(j);
      }
      depths[t] = depth;
      max_depth = std::max<int64_t>(max_depth, depth);
    }
  }
};

// Returns the number of floats that attend_tail needs: for blocks of scores in storage order, a block of scores in path order, a block of
// weights in storage order, and a block of keys or values.
int64_t tail_size(int64_t rows, int64_t d, int64_t n_tree_keys) {
  return BLOCK * (round_up_rows(rows) * ((BLOCK + n_tree_keys + BLOCK - 1) / BLOCK + 2) + d);
}

// Adds the weighted values of a block in path order to part.out, on AMX: n_prefix keys of the prefix from key first_key on, without the
// first n_unseen, then each row's tree keys from path index first_rank on. Tree key 0 is key tree_start of the cache. Tiles whose keys all
// belong to the prefix are shared by all rows. The others are computed token by token, because a tile must have the path's keys.
void accumulate_pv_tail(const AttentionInput &in, const KVHead &head_kv, int64_t tree_start, int64_t first_key, int64_t n_unseen,
                        int64_t n_prefix, const TreePaths &paths, int64_t first_rank, float *p) {
  const int64_t n_shared = n_prefix / bf16::TILE_DEPTH * bf16::TILE_DEPTH, heads = in.rows / paths.n_tokens;
  if (n_unseen < n_shared) accumulate_pv_block(in, head_kv, first_key, n_unseen, n_shared, p, nullptr);
  static thread_local Scratch scratch;
  float *token_out = scratch.get(round_up_rows(heads) * (in.d + BLOCK)), *weights = token_out + round_up_rows(heads) * in.d;
  const BFloat16 *v = static_cast<BFloat16 *>(head_kv.v);
  const bf16::Operands operands(heads, BLOCK, in.d);
  for (int64_t t = 0; t < paths.n_tokens; t++) {
    const int64_t end = std::min(BLOCK, n_prefix + std::max<int64_t>(0, paths.depths[t] - first_rank)) - n_shared;
    if (end <= 0) continue;
    const int64_t depth = bf16::round_up(end, bf16::TILE_DEPTH);
    const auto row_ptr = [&](int64_t i) -> const BFloat16 * {
      const int64_t position = n_shared + i;
      if (i >= end || position < n_unseen) return nullptr;
      const int64_t key = position < n_prefix ? first_key + position
                                              : tree_start + paths.keys[t * paths.n_keys + first_rank + position - n_prefix];
      return v + key * head_kv.v_row_stride;
    };
    bf16::interleave_row_pairs(row_ptr, depth, in.d, in.d, 0, operands.rhs);
    for (int64_t h = 0; h < heads; h++) {
      const int64_t r = h * paths.n_tokens + t;
      std::copy_n(in.part.out + r * in.d, in.d, token_out + h * in.d);
      std::copy_n(p + r * BLOCK + n_shared, end, weights + h * BLOCK);
      std::fill_n(weights + h * BLOCK + end, depth - end, 0.0f);
    }
    bf16::round_matrix(weights, BLOCK, heads, depth, 1, depth, operands.lhs);
    bf16::multiply(operands.lhs, round_up_rows(heads), depth, operands.rhs, in.d, token_out, in.d, true);
    for (int64_t h = 0; h < heads; h++) std::copy_n(token_out + h * in.d, in.d, in.part.out + (h * paths.n_tokens + t) * in.d);
  }
}

// Attends to the tail, from key tail_start on: the last n_tail_prefix keys of the prefix, and the tree's keys. Row r belongs to token
// r % paths.n_tokens. Computes only the blocks in path order that begin in [from, to).
void attend_tail(const AttentionInput &in, const KVHead &head_kv, int64_t tail_start, int64_t n_tail_prefix, const TreePaths &paths,
                 const std::int32_t *window_start, int64_t from, int64_t to, float *buffer) {
  const int64_t tail_len = n_tail_prefix + paths.n_keys, block_size = round_up_rows(in.rows) * BLOCK;
  float *storage_scores = buffer, *path_scores = storage_scores + (tail_len + BLOCK - 1) / BLOCK * block_size;
  float *weights = path_scores + block_size, *kt = weights + block_size;
  for (int64_t j = 0; j < tail_len; j += BLOCK) {
    score_block(in, head_kv, tail_start + j, std::min(BLOCK, tail_len - j), storage_scores + j / BLOCK * block_size, kt);
  }
  const auto score_of = [=](int64_t r, int64_t key) -> float { return storage_scores[key / BLOCK * block_size + r * BLOCK + key % BLOCK]; };
  for (int64_t first_key = from; first_key < std::min(to, tail_start + n_tail_prefix + paths.max_depth); first_key += BLOCK) {
    // Gathers the scores of a block in path order: n_prefix keys of the prefix, then each row's tree keys from path index first_rank on.
    const int64_t n_prefix = first_key == tail_start ? n_tail_prefix : 0;
    const int64_t first_rank = first_key == tail_start ? 0 : first_key - tail_start - n_tail_prefix;
    const int64_t n_keys = std::min(BLOCK, n_prefix + paths.max_depth - first_rank);
    for (int64_t r = 0; r < in.rows; r++) {
      const int64_t t = r % paths.n_tokens;
      float *s = path_scores + r * BLOCK;
      std::copy_n(storage_scores + r * BLOCK, n_prefix, s);
      const int64_t end = std::min(BLOCK, n_prefix + std::max<int64_t>(0, paths.depths[t] - first_rank));
      for (int64_t j = n_prefix; j < end; j++) s[j] = score_of(r, n_tail_prefix + paths.keys[t * paths.n_keys + first_rank + j - n_prefix]);
      for (int64_t j = end; j < n_keys; j++) s[j] = MASKED;
    }
    mask_before_window(path_scores, in.rows, first_key, n_keys, window_start, paths.n_tokens);
    online_softmax_update(path_scores, in.rows, n_keys, in.d, in.part);
    const int64_t n_unseen = std::min(n_prefix, std::max<int64_t>(0, in.window_begin - first_key));
    if (HAVE_AMX && in.bf16) {
      accumulate_pv_tail(in, head_kv, tail_start + n_tail_prefix, first_key, n_unseen, n_prefix, paths, first_rank, path_scores);
      continue;
    }
    if (n_unseen < n_prefix) accumulate_pv_block(in, head_kv, first_key, n_unseen, n_prefix, path_scores, kt);
    // Values of the tree are read in storage order, once for all rows. Keys that a row does not see get weight 0, which changes no bit.
    for (int64_t first = 0; first < paths.n_keys; first += BLOCK) {
      const int64_t count = std::min(BLOCK, paths.n_keys - first);
      for (int64_t r = 0; r < in.rows; r++) {
        const int64_t t = r % paths.n_tokens;
        std::fill_n(weights + r * BLOCK, count, 0.0f);
        for (int64_t rank = first_rank; rank < std::min<int64_t>(paths.depths[t], first_rank + BLOCK - n_prefix); rank++) {
          const int64_t key = paths.keys[t * paths.n_keys + rank] - first;
          if (key >= 0 && key < count) weights[r * BLOCK + key] = path_scores[r * BLOCK + n_prefix + rank - first_rank];
        }
      }
      accumulate_pv_block(in, head_kv, tail_start + n_tail_prefix + first, 0, count, weights, kt);
    }
  }
}

// Returns the index of the first of n_keys keys that at least one of n_tokens tokens sees.
int64_t first_seen_key(const std::int32_t *window_start, int64_t n_tokens, int64_t n_keys) {
  return window_start ? std::clamp<int64_t>(*std::min_element(window_start, window_start + n_tokens), 0, n_keys - 1) : 0;
}

}  // namespace

Status longdraft_attend(const float *q, const KVCache *kv, int64_t slot, int64_t n_kv_heads, int64_t rows, int64_t d, int64_t n_kv,
                      const std::uint8_t *mask, int64_t mask_rows, int64_t mask_width, const std::int32_t *window_start,
                      const SoftmaxParams *softmax, float *out, int threads) try {
  static thread_local Scratch caller_scratch;
  if (!mask) mask_width = 0;
  const bool bf16 = use_amx_bf16(*kv);
  const int64_t prefix = n_kv - mask_width, tail_start = mask_width ? prefix / BLOCK * BLOCK : n_kv;
  // Segments before the windows of all rows are skipped.
  const int64_t window_begin = first_seen_key(window_start, mask_rows, n_kv), first_segment = window_begin / SEGMENT;
  const int64_t n_segments = (n_kv + SEGMENT - 1) / SEGMENT - first_segment, size = partial_size(rows, d);
  const int64_t paths_size = Scratch::round_up_to_line(TreePaths::size(mask_rows, mask_width)), q_size = scaled_queries_size(rows, d, bf16);
  float *scaled = caller_scratch.get(paths_size + n_kv_heads * (q_size + n_segments * size));
  float *partials = scaled + n_kv_heads * q_size + paths_size;
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
    for (int64_t first_key = from; first_key < std::min(to, tail_start); first_key += BLOCK) {
      attend_block(in, head_kv, first_key, std::min(BLOCK, to - first_key), buffer, buffer + BLOCK * round_up_rows(rows),
                   [=](float *s, int64_t first, int64_t n_keys) { mask_before_window(s, rows, first, n_keys, window_start, mask_rows); });
    }
    if (to > tail_start) {
      attend_tail(in, head_kv, tail_start, prefix - tail_start, paths, window_start, std::max(from, tail_start), to, buffer);
    }
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
                            int64_t d, int64_t n_kv, const std::int32_t *window_start, int64_t n_first, const SoftmaxParams *softmax,
                            float *out, int threads) try {
  // Queries of a work item: their scores and a block of keys fit the L2 cache. More with AMX, where all share one interleaving of a block.
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
    const int64_t window_begin = first_seen_key(item_window_start, count, before + count);
    const auto causal_mask = [=](float *scores, int64_t first_key, int64_t n_keys) {
      mask_before_window(scores, count, first_key, n_keys, item_window_start, count, n_first);
      for (int64_t r = 0; r < count; r++) {  // causal: row r sees keys up to before + r
        for (int64_t j = std::max(first_key, before + r + 1); j < first_key + n_keys; j++) scores[r * BLOCK + j - first_key] = MASKED;
      }
    };
    const PartialAttention all = empty_partial(partials, count, d);
    bool is_empty = true;
    for (int64_t from = 0; from < before + count; from += SEGMENT) {
      if (from >= n_first && from + SEGMENT <= window_begin) continue;
      const PartialAttention part = is_empty ? all : empty_partial(partials + size, count, d);
      for (int64_t key = from; key < std::min(before + count, from + SEGMENT); key += BLOCK) {
        if (key >= n_first && key + BLOCK <= window_begin) continue;
        const int64_t n_keys = std::min(BLOCK, before + count - key), seen_from = key < n_first ? 0 : window_begin;
        attend_block({scaled, count, d, part, softmax->softcap, seen_from, bf16}, head_kv, key, n_keys, s, kt, causal_mask);
      }
      if (!is_empty) merge_partials(all, part, count, d);
      is_empty = false;
    }
    normalize(all, count, d, out + (head * rows + first) * d, softmax->sinks ? softmax->sinks + head : nullptr, count);
  });
  return OK;
} CATCH_EXCEPTIONS
