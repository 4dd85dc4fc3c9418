"""Scorers rank chunks of KV entries by a layer's queries. A chunk is one or more adjacent entries.

Shapes: Hkv KV heads, G query heads for each KV head, Hq = Hkv * G query heads, M query tokens, n keys, head size d. The
scores of the single queries are reduced over the M tokens and averaged over the G heads, so each KV head ranks its own
chunks. Sums are float32. All tensors may have a leading dimension for several layers.

========== ======================================================================== =============================
minmax     max(q . Kmax, q . Kmin), element-wise maximum and minimum of the keys    SpecPV, section 3.2
quest      sum_d max(q_d Kmax_d, q_d Kmin_d), an upper bound on q . k               Quest
mean-key   q . mean(K)                                                              TriForce, section 4.1
tokens     the largest q . k of the chunk                                           TokenSwift, section 3
attention  the chunk's attention weights, softmax over the whole context            SpecExtend, section 2.2
snapkv     attention weights, softmax over all before the window, average pooling   SnapKV; MagicDec, section 4
streaming  none: nothing is selected                                                StreamingLLM
========== ======================================================================== =============================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from longdraft.views.summaries import summarize

REDUCTIONS = ("mean", "max", "last")
# Kernel size of SnapKV's average pooling; the default of the authors' code.
SNAPKV_POOL_SIZE = 5

# Reduces scores of single queries (Hkv, G, M, n) over M and G to (Hkv, n).
ReduceFunction = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class CandidateChunks:
    """The chunks of a layer that a scorer scores: chunks ``[start, end)`` of the context.

    Attributes:
        keys: (Hkv, n, d) keys of the whole context, after RoPE.
        start: the first candidate.
        end: the chunk after the last candidate.
        chunk_size: number of entries of a chunk.
        summaries: kind -> (Hkv, chunks, d) summaries of all chunks of the context, which replace the keys; None: the
            scorer reads the keys.
    """

    keys: torch.Tensor
    start: int
    end: int
    chunk_size: int
    summaries: Mapping[str, torch.Tensor] | None = None

    @property
    def chunk_keys(self) -> torch.Tensor:
        """The keys of the candidates, (Hkv, entries, d)."""
        return self.keys[..., self.start * self.chunk_size : self.end * self.chunk_size, :]

    def summary(self, kind: str) -> torch.Tensor:
        """Returns the candidates' summaries of this kind, (Hkv, chunks, d)."""
        if self.summaries is not None:
            return self.summaries[kind][..., self.start : self.end, :]
        return summarize(kind, self.chunk_keys.unflatten(-2, (-1, self.chunk_size)))

    def group_by_chunk(self, scores: torch.Tensor) -> torch.Tensor:
        """Splits the scores of entries into chunks: (..., entries) -> (..., chunks, chunk_size)."""
        return scores.unflatten(-1, (-1, self.chunk_size))


def _dot_products(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Multiplies queries (Hkv, G, M, d) with keys (Hkv, n, d). Returns (Hkv, G, M, n)."""
    return (q.flatten(-3, -2) @ keys.float().transpose(-1, -2)).unflatten(-2, q.shape[-3:-1])


def _attention_weights(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Returns the attention weights of each query, (Hkv, G, M, n)."""
    return torch.softmax(_dot_products(q * q.shape[-1] ** -0.5, keys), -1)


# The functions of SCORERS, named after the scorers.
def minmax(q: torch.Tensor, candidates: CandidateChunks, reduce: ReduceFunction) -> torch.Tensor:
    scores = _dot_products(q, candidates.summary("largest"))
    return reduce(torch.maximum(scores, _dot_products(q, candidates.summary("smallest")), out=scores))


def quest(q: torch.Tensor, candidates: CandidateChunks, reduce: ReduceFunction) -> torch.Tensor:
    # max(q_d Kmax_d, q_d Kmin_d) is q_d Kmax_d if q_d > 0, else q_d Kmin_d.
    from_positive_q = _dot_products(q.clamp(min=0), candidates.summary("largest"))
    return reduce(from_positive_q + _dot_products(q.clamp(max=0), candidates.summary("smallest")))


def mean_key(q: torch.Tensor, candidates: CandidateChunks, reduce: ReduceFunction) -> torch.Tensor:
    if candidates.summaries is not None:
        return reduce(_dot_products(q, candidates.summary("mean")))
    # q . mean(K) is the mean of q . k.
    return reduce(candidates.group_by_chunk(_dot_products(q, candidates.chunk_keys)).mean(-1))


def tokens(q: torch.Tensor, candidates: CandidateChunks, reduce: ReduceFunction) -> torch.Tensor:
    return reduce(candidates.group_by_chunk(_dot_products(q, candidates.chunk_keys)).amax(-1))


def attention(q: torch.Tensor, candidates: CandidateChunks, reduce: ReduceFunction) -> torch.Tensor:
    start, end = candidates.start * candidates.chunk_size, candidates.end * candidates.chunk_size
    return reduce(candidates.group_by_chunk(_attention_weights(q, candidates.keys)[..., start:end]).sum(-1))


def snapkv(q: torch.Tensor, candidates: CandidateChunks, reduce: ReduceFunction) -> torch.Tensor:
    start, end = candidates.start * candidates.chunk_size, candidates.end * candidates.chunk_size
    weights = reduce(_attention_weights(q, candidates.keys[..., :end, :]))
    pooled = torch.nn.functional.avg_pool1d(weights, SNAPKV_POOL_SIZE, 1, SNAPKV_POOL_SIZE // 2)
    return candidates.group_by_chunk(pooled[..., start:]).sum(-1)


@dataclass(frozen=True)
class Scorer:
    """A scorer and the inputs that it needs.

    Attributes:
        score: function of (queries (Hkv, G, M, d) float32, candidates, reduce) -> (Hkv, chunks) float32.
        summary_kinds: kinds of summaries that ``score`` can read in place of the keys.
        uses_window_queries: True if all tokens of the window are query tokens; False: only the newest token.
    """

    score: Callable[[torch.Tensor, CandidateChunks, ReduceFunction], torch.Tensor]
    summary_kinds: tuple[str, ...] = ()
    uses_window_queries: bool = False


SCORERS: dict[str, Scorer | None] = {
    "minmax": Scorer(minmax, ("largest", "smallest")),
    "quest": Scorer(quest, ("largest", "smallest")),
    "mean-key": Scorer(mean_key, ("mean",)),
    "tokens": Scorer(tokens),
    "attention": Scorer(attention),
    "snapkv": Scorer(snapkv, uses_window_queries=True),
    "streaming": None,
}


def score_chunks(name: str, reduction: str, queries: torch.Tensor, candidates: CandidateChunks) -> torch.Tensor:
    """Scores the candidates of a layer. Returns (Hkv, chunks) float32.

    Args:
        name: one of ``SCORERS`` except "streaming".
        reduction: how scores of several tokens become one: "mean", "max", or "last" for only the newest token.
        queries: (Hq, M, d), after RoPE, the newest token last.
        candidates: the chunks to score.
    """
    scorer = SCORERS[name]
    assert scorer is not None
    kv_heads = candidates.keys.shape[-3]
    q = queries.float().unflatten(-3, (kv_heads, -1))
    if reduction == "last":
        q = q[..., -1:, :]

    def reduce(scores: torch.Tensor) -> torch.Tensor:
        return (scores.amax(-2) if reduction == "max" else scores.mean(-2)).mean(-2)

    if candidates.summaries is not None and scorer.summary_kinds:
        return scorer.score(q, candidates, reduce)
    # One KV head at a time, because float32 copies of the keys, and the attention weights, need much memory.
    by_head = (
        scorer.score(
            q[..., h : h + 1, :, :, :],
            replace(candidates, keys=candidates.keys[..., h : h + 1, :, :], summaries=None),
            reduce,
        )
        for h in range(kv_heads)
    )
    return torch.cat(list(by_head), dim=-2)
