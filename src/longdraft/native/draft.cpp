// One level of a draft's tree in one call: LongSpec's or EAGLE-3's block, the head, and each node's likeliest next tokens.
//
// A draft is one layer: in Python the operations between its products would take several times as long as the products.
#include "mlp.h"

using std::int64_t;

namespace {

// The keys that rows see: [begins, ends) of each sequence; among the last `width` of them, those in `masks`.
struct Seen {
  const KeysValues &kv;
  const int64_t *begins, *ends;
  const std::uint8_t *masks;
  int64_t width;
};

// q (B, W, heads * d), before RoPE, becomes the attention's output. room: twice its size.
void attend(const Draft &l, const Nodes &n, const Seen &seen, float *q, float *room, int threads) {
  const int64_t size = n.width, inner = l.heads * l.d, d = l.d;
  float *turned = room, *found = room + Scratch::whole_lines(size * inner);
  int64_t row = 0;
  for (int64_t b = 0; b < n.sequences; b++, q += size * inner) {
    row += n.counts[b] - size;
    for (int64_t t = 0; t < size; t++, row++) {
      for (int64_t h = 0; h < l.heads; h++) {
        turn(q + t * inner + h * d, n.cos + row * d, n.sin + row * d, d, d, turned + (h * size + t) * d);
      }
    }
    KeysValues kv = seen.kv;
    const int64_t begin = seen.begins ? seen.begins[b] : 0, keys = seen.ends[b] - begin;
    const std::uint8_t *mask = seen.masks ? seen.masks + b * size * seen.width : nullptr;
    if (begin) {  // only for the draft's own keys, which are floats
      kv.k = static_cast<float *>(kv.k) + begin * kv.k_row;
      kv.v = static_cast<float *>(kv.v) + begin * kv.v_row;
    }
    const Scoring scoring{l.scale, 0, nullptr};
    must(longdraft_attend(turned, &kv, n.slots[b], l.kv_heads, l.heads / l.kv_heads * size, d, keys, mask, size, seen.width,
                          nullptr, &scoring, found, threads));
    for (int64_t t = 0; t < size; t++) {
      for (int64_t h = 0; h < l.heads; h++) std::copy_n(found + (h * size + t) * d, d, q + t * inner + h * d);
    }
  }
}

void level(const Draft &l, const Nodes &n, const KeysValues *own, const KeysValues *text, int64_t best, float *out,
           float *logits, float *logprobs, int64_t *tokens, int threads) {
  const int64_t hidden = l.hidden, d = l.d, q_size = l.heads * d, kv_size = l.kv_heads * d;
  const int64_t input = l.feature_norm ? 2 * hidden : hidden, going = n.sequences * n.width;
  int64_t all = 0;
  for (int64_t b = 0; b < n.sequences; b++) all += n.counts[b];
  static thread_local Scratch scratch;
  const auto [entering, normed, k, v, q, room, said] =
      divided<7>(scratch, 1, {all * input, going * input, all * kv_size, all * kv_size, going * q_size,
                              2 * Scratch::whole_lines(going * q_size), best ? going * l.head.outs : 0});

  for (int64_t r = 0; r < all; r++) {
    rms_norm(n.x + r * hidden, 1, hidden, l.norm, l.eps, entering + r * input);
    if (l.feature_norm) rms_norm(n.joined + r * hidden, 1, hidden, l.feature_norm, l.eps, entering + r * input + hidden);
  }
  int64_t row = 0;
  for (int64_t b = 0, to = 0; b < n.sequences; b++) {
    row += n.counts[b] - n.width;
    for (int64_t t = 0; t < n.width; t++, row++, to++) {
      const float *residual = l.feature_norm ? n.joined + row * hidden : n.x + row * hidden;
      if (l.normed_residual) residual = entering + row * input + input - hidden;
      std::copy_n(residual, hidden, out + to * hidden);
      std::copy_n(entering + row * input, input, normed + to * input);
    }
  }
  const Matrix inputs[] = {into(l.k, k, false), into(l.v, v, false), into(l.q, q, false)};
  must(longdraft_linear(entering, all, input, inputs, all == going ? 3 : 2, 0, threads));
  if (all != going) must(longdraft_linear(normed, going, input, inputs + 2, 1, 0, threads));

  row = 0;
  for (int64_t b = 0; b < n.sequences; b++) {
    for (int64_t t = 0; t < n.counts[b]; t++, row++) {
      const int64_t place = n.ends[b] - n.counts[b] + t;
      for (int64_t h = 0; h < l.kv_heads; h++) {
        turn(k + row * kv_size + h * d, n.cos + row * d, n.sin + row * d, d, d, room);  // room is still free
        write_row(*own, n.slots[b], h, place, room, v + row * kv_size + h * d, d);
      }
    }
  }
  attend(l, n, {*own, n.begins, n.ends, n.masks, n.seen}, q, room, threads);
  add_product(l.o, q, q_size, out, going, false, threads);

  if (text) {
    rms_norm(out, going, hidden, l.cross_norm, l.eps, normed);
    const Matrix query = into(l.cross_q, q, false);
    must(longdraft_linear(normed, going, hidden, &query, 1, 0, threads));
    attend(l, n, {*text, nullptr, n.lengths, nullptr, 0}, q, room, threads);
    add_product(l.cross_o, q, q_size, out, going, false, threads);
  }

  compute_mlp(l, l.eps, 0, false, nullptr, 0, out, going, false, threads);

  if (l.final_norm) rms_norm(out, going, hidden, l.final_norm, l.eps, normed);
  const Matrix head = into(l.head, best ? said : logits, false);
  must(longdraft_linear(l.final_norm ? normed : out, going, hidden, &head, 1, 0, threads));
  if (!best) return;
  likeliest(head.y, going, head.outs, best, logprobs, tokens, threads);
}

}  // namespace

Code longdraft_draft(const Draft *draft, const Nodes *nodes, const KeysValues *own, const KeysValues *text, int64_t best,
                     float *out, float *logits, float *logprobs, int64_t *tokens, int threads) try {
  Team::with(threads, [=] { level(*draft, *nodes, own, text, best, out, logits, logprobs, tokens, threads); });
  return DONE;
} CATCH_NO_MEMORY
