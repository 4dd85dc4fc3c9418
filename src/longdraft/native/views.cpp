// Views of a long KV cache (src/longdraft/views): summarizes chunks of keys, selects the best chunks, and copies them to a view. One call
// serves all layers and heads, because a call for each layer of a small model would take longer than the computation.
#include "attention.h"
#include "threads.h"
#include <vector>

namespace {

// Computes scores (chunks,) for one layer and KV head by a scorer that reads summaries (views/scorers.py): MEAN_KEY, QUEST or MINMAX, the
// unnamed branch. Reduces scores over the queries of a query head, then adds them up over the query heads of the KV head.
void score_by_summaries(const ChunkSelection &in, const float *q, int64_t layer, int64_t head, float *scores, float *buffer) {
  const int64_t n_rows = in.group_size * in.n_queries, offset = layer * in.layer_stride + head * in.head_stride + in.first_chunk;
  float *scores0 = buffer, *scores1 = scores0 + n_rows * BLOCK, *positive = scores1 + n_rows * BLOCK, *negative = positive + n_rows * in.d;
  if (in.scorer == Scorer::QUEST) {
    for (int64_t i = 0; i < n_rows * in.d; i++) {
      positive[i] = std::max(q[i], 0.0f);
      negative[i] = std::min(q[i], 0.0f);
    }
  }
  // Scores `count` summaries, from chunk first_chunk + first, as score_block scores keys.
  const auto score = [&](const float *queries, const float *summaries, int64_t first, int64_t count, float *s) {
    const KVHead source{const_cast<float *>(summaries + offset), nullptr, 1, in.dim_stride, 0, KVDtype::FLOAT32, nullptr, nullptr};
    score_block({queries, n_rows, in.d, {}}, source, first, count, s, nullptr);
  };
  const int64_t chunks = in.end_chunk - in.first_chunk;
  for (int64_t first = 0; first < chunks; first += BLOCK) {
    const int64_t count = std::min(BLOCK, chunks - first);
    if (in.scorer == Scorer::MEAN_KEY) {
      score(q, in.mean, first, count, scores0);
    } else {
      score(in.scorer == Scorer::QUEST ? positive : q, in.max, first, count, scores0);
      score(in.scorer == Scorer::QUEST ? negative : q, in.min, first, count, scores1);
      for (int64_t r = 0; r < n_rows; r++) {
        for (int64_t j = r * BLOCK; j < r * BLOCK + count; j++) {
          scores0[j] = in.scorer == Scorer::QUEST ? scores0[j] + scores1[j] : std::max(scores0[j], scores1[j]);
        }
      }
    }
    std::fill_n(scores + first, count, 0.0f);
    for (int64_t g = 0; g < in.group_size; g++) {
      float *head_scores = scores0 + g * in.n_queries * BLOCK;
      for (int64_t r = 1; r < in.n_queries; r++) {
        for (int64_t j = 0; j < count; j++) {
          head_scores[j] = in.use_max ? std::max(head_scores[j], head_scores[r * BLOCK + j]) : head_scores[j] + head_scores[r * BLOCK + j];
        }
      }
      for (int64_t j = 0; j < count; j++) scores[first + j] += head_scores[j];
    }
  }
}

// Computes scores (chunks,) for one layer and KV head by a scorer that reads all keys. Scores every key for every query, block by block,
// into token_scores (blocks, query heads x queries, BLOCK). Then TOKENS takes each chunk's highest score. ATTENTION and SNAPKV add up
// softmax(token_scores) over the queries (weight_sums, whose last block is spare), then over a chunk's keys.
void score_by_keys(const ChunkSelection &in, const float *q, int64_t layer, int64_t head, float *scores, Scratch &scratch) {
  constexpr int64_t POOL = 5;  // SnapKV pools a key's weight over this many neighbouring keys
  const int64_t n_rows = in.group_size * in.n_queries, end = in.scorer == Scorer::ATTENTION ? in.kv_len : in.end_chunk * in.chunk_size;
  const int64_t blocks = (end + BLOCK - 1) / BLOCK, block_size = n_rows * BLOCK;
  float *token_scores = scratch.get((blocks + 1) * (block_size + BLOCK) + in.d * BLOCK);
  float *weight_sums = token_scores + blocks * block_size, *transposed_keys = weight_sums + (blocks + 1) * BLOCK;
  const KVHead source = kv_head(kv_layer(*in.kv, layer), in.slot, head);
  for (int64_t first = 0; first < end; first += BLOCK) {
    float *block_scores = token_scores + first / BLOCK * block_size;
    std::fill_n(block_scores, block_size, MASKED);
    score_block({q, n_rows, in.d, {}}, source, first, std::min(BLOCK, end - first), block_scores, transposed_keys);
  }
  const int64_t chunks = in.end_chunk - in.first_chunk;
  std::fill_n(scores, chunks, 0.0f);
  if (in.scorer == Scorer::TOKENS) {
    for (int64_t r = 0; r < n_rows; r++) {
      for (int64_t c = 0; c < chunks; c++) {
        float max_score = MASKED;
        for (int64_t j = (in.first_chunk + c) * in.chunk_size; j < (in.first_chunk + c + 1) * in.chunk_size; j++) {
          max_score = std::max(max_score, token_scores[j / BLOCK * block_size + r * BLOCK + j % BLOCK]);
        }
        scores[c] += max_score;
      }
    }
    return;
  }
  std::fill_n(weight_sums, (blocks + 1) * BLOCK, 0.0f);
  for (int64_t r = 0; r < n_rows; r++) {
    float max_score = MASKED;
    for (int64_t b = 0; b < blocks; b++) {
      for (int64_t j = 0; j < BLOCK; j++) max_score = std::max(max_score, token_scores[b * block_size + r * BLOCK + j]);
    }
    vec total = {};
    for (int64_t b = 0; b < blocks; b++) {
      for (float *p = token_scores + b * block_size + r * BLOCK, *last = p + BLOCK; p < last; p += LANES) {
        const vec x = v_exp(load(p) - max_score);
        store(p, x);
        total += x;
      }
    }
    float sum = 0.0f;
    for (int i = 0; i < LANES; i++) sum += total[i];
    for (int64_t b = 0; b < blocks; b++) {
      const float *p = token_scores + b * block_size + r * BLOCK;
      float *to = weight_sums + b * BLOCK;
      for (int64_t j = 0; j < BLOCK; j += LANES) store(to + j, load(to + j) + load(p + j) / sum);
    }
  }
  for (int64_t c = 0; c < chunks; c++) {
    for (int64_t j = (in.first_chunk + c) * in.chunk_size; j < (in.first_chunk + c + 1) * in.chunk_size; j++) {
      if (in.scorer == Scorer::ATTENTION) {
        scores[c] += weight_sums[j];
        continue;
      }
      for (int64_t i = std::max<int64_t>(0, j - POOL / 2); i <= std::min(end - 1, j + POOL / 2); i++) scores[c] += weight_sums[i];
    }
  }
}

// The source's entries [from, from + count), which are copied to the view's entries [to, to + count).
struct CopyRange {
  int64_t from, to, count;
};

// Copies keys dimension by dimension, because in transposed keys, a dimension's values of consecutive entries are contiguous.
template <typename E> void copy_keys(const KVHead &source, const KVHead &view, int64_t d, const std::vector<CopyRange> &ranges) {
  const auto *k = static_cast<const E *>(source.k);
  auto *k_to = static_cast<E *>(view.k);
  const bool is_transposed = source.k_row_stride == 1 && view.k_row_stride == 1;
  for (int64_t i = 0; i < d; i++) {
    const E *keys = k + i * source.k_dim_stride;
    E *to = k_to + i * view.k_dim_stride;
    for (const CopyRange &p : ranges) {
      if (is_transposed) {
        std::copy_n(keys + p.from, p.count, to + p.to);
      } else {
        for (int64_t j = 0; j < p.count; j++) to[(p.to + j) * view.k_row_stride] = keys[(p.from + j) * source.k_row_stride];
      }
    }
  }
}

// Copies keys to a view of another dtype entry by entry, because a scale depends on several dimensions of an entry.
template <typename E> void quantize_keys(const KVHead &source, const KVHead &view, int64_t d, const std::vector<CopyRange> &ranges) {
  constexpr int64_t ENTRIES_AT_A_TIME = 64;  // so that each read of a dimension uses whole cache lines
  static thread_local Scratch scratch;
  float *rows = scratch.get(ENTRIES_AT_A_TIME * d);
  const auto *k = static_cast<const E *>(source.k);
  for (const CopyRange &p : ranges) {
    for (int64_t a = 0; a < p.count; a += ENTRIES_AT_A_TIME) {
      const int64_t count = std::min(ENTRIES_AT_A_TIME, p.count - a);
      for (int64_t i = 0; i < d; i++) {
        const E *keys = k + i * source.k_dim_stride + (p.from + a) * source.k_row_stride;
        for (int64_t j = 0; j < count; j++) rows[j * d + i] = load_scalar(keys + j * source.k_row_stride);
      }
      for (int64_t j = 0; j < count; j++) write_key(view, p.to + a + j, rows + j * d, d);
    }
  }
}

// Copies keys and values. E: the source's element type, float or BFloat16.
template <typename E> void copy_ranges(const KVHead &source, const KVHead &view, int64_t d, const std::vector<CopyRange> &ranges) {
  (view.dtype == source.dtype ? copy_keys<E> : quantize_keys<E>)(source, view, d, ranges);
  static thread_local Scratch scratch;
  float *value = scratch.get(d);
  const auto *v = static_cast<const E *>(source.v);
  for (const CopyRange &p : ranges) {
    for (int64_t j = 0; j < p.count; j++) {
      for (int64_t i = 0; i < d; i++) value[i] = load_scalar(v + (p.from + j) * source.v_row_stride + i);
      write_value(view, p.to + j, value, d);
    }
  }
}

void copy_ranges(const KVHead &source, const KVHead &view, int64_t d, const std::vector<CopyRange> &ranges) {
  (source.dtype == KVDtype::BFLOAT16 ? copy_ranges<BFloat16> : copy_ranges<float>)(source, view, d, ranges);
}

// Puts selected chunks that the view lacks in the place of chunks that are no longer selected. chunk_ids (count,): ids of the selected
// chunks, sorted. resident (count,): ids of the view's chunks, which are updated. Calls copy_chunk(chunk id, index in the view).
template <typename CopyChunk>
void replace_chunks(const int64_t *chunk_ids, int64_t *resident, int64_t count, const CopyChunk &copy_chunk) {
  static thread_local std::vector<int64_t> sorted, incoming;
  sorted.assign(resident, resident + count);
  std::sort(sorted.begin(), sorted.end());
  incoming.clear();
  for (int64_t i = 0; i < count; i++) {
    if (!std::binary_search(sorted.begin(), sorted.end(), chunk_ids[i])) incoming.push_back(chunk_ids[i]);
  }
  for (int64_t i = 0, next = 0; i < count; i++) {
    if (std::binary_search(chunk_ids, chunk_ids + count, resident[i])) continue;
    resident[i] = incoming[static_cast<std::size_t>(next++)];
    copy_chunk(resident[i], i);
  }
}

// Summarizes one dimension of the keys of chunks [begin, end). k: that dimension of key 0. offset: index of chunk 0's summary.
template <typename E>
void summarize_dimension(const E *k, int64_t k_row_stride, int64_t chunk_size, const ChunkSummaries *out, int64_t offset, int64_t begin,
                         int64_t end) {
  for (int64_t c = begin; c < end; c++) {
    const E *keys = k + c * chunk_size * k_row_stride;
    float key_max = load_scalar(keys), key_min = key_max, sum = 0.0f;
    for (int64_t j = 0; j < chunk_size; j++) {
      const float x = load_scalar(keys + j * k_row_stride);
      key_max = std::max(key_max, x);
      key_min = std::min(key_min, x);
      sum += x;
    }
    if (out->max) out->max[offset + c] = key_max;
    if (out->min) out->min[offset + c] = key_min;
    if (out->mean) out->mean[offset + c] = sum / static_cast<float>(chunk_size);
  }
}

}  // namespace

Status longdraft_summarize_chunks(const KVCache *kv, int64_t slot, int64_t n_layers, int64_t n_kv_heads, int64_t d,
                                  int64_t chunk_size, const ChunkSummaries *out, int64_t begin, int64_t end, int threads) try {
  parallel_for(threads, n_layers * n_kv_heads, [&](int64_t item) {
    const int64_t layer = item / n_kv_heads, head = item % n_kv_heads;
    const KVHead source = kv_head(kv_layer(*kv, layer), slot, head);
    const int64_t offset = layer * out->layer_stride + head * out->head_stride;
    for (int64_t i = 0; i < d; i++) {
      dispatch_dtype(source.k, source.dtype, [&](auto *k) {
        summarize_dimension(k + i * source.k_dim_stride, source.k_row_stride, chunk_size, out, offset + i * out->dim_stride, begin, end);
      });
    }
  });
  return OK;
} CATCH_EXCEPTIONS

Status longdraft_select_chunks(const ChunkSelection *selection, const float *queries, int64_t *chunk_ids, int threads) try {
  const ChunkSelection &in = *selection;
  const int64_t chunks = in.end_chunk - in.first_chunk, rows = in.group_size * in.n_queries;
  if (in.n_selected < 0 || in.n_selected > chunks) return INVALID_ARGUMENT;
  parallel_for(threads, in.n_layers * in.n_kv_heads, [&](int64_t item) {
    static thread_local Scratch scratch, keys_scratch;
    const int64_t scores_size = Scratch::round_up_to_line(chunks), order_size = Scratch::round_up_to_line(2 * chunks);
    float *scores = scratch.get(scores_size + order_size + 2 * rows * (BLOCK + in.d));
    auto *order = reinterpret_cast<int64_t *>(scores + scores_size);
    const float *q = queries + item * rows * in.d;
    if (in.scorer >= Scorer::TOKENS) {
      score_by_keys(in, q, item / in.n_kv_heads, item % in.n_kv_heads, scores, keys_scratch);
    } else {
      score_by_summaries(in, q, item / in.n_kv_heads, item % in.n_kv_heads, scores, scores + scores_size + order_size);
    }
    for (int64_t i = 0; i < chunks; i++) order[i] = i;
    // NaN ranks last, because nth_element needs a consistent order.
    const auto ranks_before = [&](int64_t a, int64_t b) {
      const bool a_valid = scores[a] == scores[a], b_valid = scores[b] == scores[b];
      if (a_valid != b_valid) return a_valid;
      return a_valid && scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
    };
    std::nth_element(order, order + in.n_selected, order + chunks, ranks_before);
    std::sort(order, order + in.n_selected);
    for (int64_t i = 0; i < in.n_selected; i++) chunk_ids[item * in.n_selected + i] = in.first_chunk + order[i];
  });
  return OK;
} CATCH_EXCEPTIONS

Status longdraft_copy_view(const KVCache *kv, const KVCache *view, int64_t slot, int64_t n_layers, int64_t n_kv_heads, int64_t d,
                           const int64_t *chunk_ids, int64_t *resident, int64_t n_chunks, int64_t chunk_size, int64_t n_sink,
                           int64_t window_begin, int64_t window_end, int threads) try {
  parallel_for(threads, n_layers * n_kv_heads, [&](int64_t item) {
    static thread_local std::vector<CopyRange> ranges;
    const int64_t layer = item / n_kv_heads, head = item % n_kv_heads;
    ranges.clear();
    if (!n_chunks || resident[item * n_chunks] < 0) ranges.push_back({0, 0, n_sink});  // else the view has them already
    replace_chunks(chunk_ids + item * n_chunks, resident + item * n_chunks, n_chunks, [&](int64_t chunk_id, int64_t index) {
      ranges.push_back({chunk_id * chunk_size, n_sink + index * chunk_size, chunk_size});
    });
    ranges.push_back({window_begin, n_sink + n_chunks * chunk_size, window_end - window_begin});
    copy_ranges(kv_head(kv_layer(*kv, layer), slot, head), kv_head(kv_layer(*view, layer), slot, head), d, ranges);
  });
  return OK;
} CATCH_EXCEPTIONS

Status longdraft_copy_entries(const KVCache *kv, const KVCache *view, int64_t slot, int64_t n_layers, int64_t n_kv_heads, int64_t d,
                              int64_t from, int64_t to, int64_t count, int threads) try {
  parallel_for(threads, n_layers * n_kv_heads, [&](int64_t item) {
    const int64_t layer = item / n_kv_heads, head = item % n_kv_heads;
    const KVHead source = kv_head(kv_layer(*kv, layer), slot, head), view_head = kv_head(kv_layer(*view, layer), slot, head);
    copy_ranges(source, view_head, d, {{from, to, count}});
  });
  return OK;
} CATCH_EXCEPTIONS
