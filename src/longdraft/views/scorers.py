"""Scorers rank chunks of KV entries by a layer's queries. A chunk is one or more adjacent entries.

Queries are (Hkv, G, M, d): each KV head has a group of G query heads, and there are M tokens. Scores of single queries
are reduced over the M tokens and averaged over the group, so each KV head ranks its own chunks. Sums are float32.

Shapes are those of one layer. All arguments may have a leading dimension for several layers, with equal results.

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
# Kernel size of SnapKV's average pooling.
SNAPKV_POOL_SIZE = 5

# Reduces scores of single queries (Hkv, G, M, n) over M and G -> (Hkv, n)
ReduceFunction = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class CandidateChunks:
    """The chunks of a layer that are to be scored.

    Attributes:
        keys: (Hkv, n, d) of the whole context, after RoPE.
        start, end: chunks [start, end) are to be scored.
        chunk_size: entries of a chunk.
        summaries: kind -> (Hkv, chunks, d) of all chunks from chunk 0 on, to read in place of keys; None: read keys.
    """

    keys: torch.Tensor
    start: int
    end: int
    chunk_size: int
    summaries: Mapping[str, torch.Tensor] | None = None

    @property
    def chunk_keys(self) -> torch.Tensor:
        """Keys of the scored chunks, (Hkv, entries, d)."""
        return self.keys[..., self.start * self.chunk_size : self.end * self.chunk_size, :]

    def summary(self, kind: str) -> torch.Tensor:
        """Returns summaries of the scored chunks, (Hkv, chunks, d)."""
        if self.summaries is not None:
            return self.summaries[kind][..., self.start : self.end, :]
        return summarize(kind, self.chunk_keys.unflatten(-2, (-1, self.chunk_size)))

    def group_by_chunk(self, x: torch.Tensor) -> torch.Tensor:
        """Splits entries into chunks: (..., entries) -> (..., chunks, chunk_size)."""
        return x.unflatten(-1, (-1, self.chunk_size))


def _dot_products(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Queries (Hkv, G, M, d) . keys (Hkv, n, d) -> (Hkv, G, M, n)."""
    return (q.flatten(-3, -2) @ keys.float().transpose(-1, -2)).unflatten(-2, q.shape[-3:-1])


def _attention_weights(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The attention weights of each query, (Hkv, G, M, n)."""
    return torch.softmax(_dot_products(q * q.shape[-1] ** -0.5, keys), -1)


def minmax(q: torch.Tensor, chunks: CandidateChunks, reduce: ReduceFunction) -> torch.Tensor:
    scores = _dot_products(q, chunks.summary("largest"))
    return reduce(torch.maximum(scores, _dot_products(q, chunks.summary("smallest")), out=scores))


def quest(q: torch.Tensor, chunks: CandidateChunks, reduce: ReduceFunction) -> torch.Tensor:
    """The maximum is q_d Kmax_d where q_d > 0, else q_d Kmin_d, so two matrix products compute it."""
    positive = _dot_products(q.clamp(min=0), chunks.summary("largest"))
    return reduce(positive + _dot_products(q.clamp(max=0), chunks.summary("smallest")))


def mean_key(q: torch.Tensor, chunks: CandidateChunks, reduce: ReduceFunction) -> torch.Tensor:
    """Without summaries, uses that q . mean(K) is the mean of q . k."""
    if chunks.summaries is not None:
        return reduce(_dot_products(q, chunks.summary("mean")))
    return reduce(chunks.group_by_chunk(_dot_products(q, chunks.chunk_keys)).mean(-1))


def tokens(q: torch.Tensor, chunks: CandidateChunks, reduce: ReduceFunction) -> torch.Tensor:
    return reduce(chunks.group_by_chunk(_dot_products(q, chunks.chunk_keys)).amax(-1))


def attention(q: torch.Tensor, chunks: CandidateChunks, reduce: ReduceFunction) -> torch.Tensor:
    weights = _attention_weights(q, chunks.keys)[..., chunks.start * chunks.chunk_size : chunks.end * chunks.chunk_size]
    return reduce(chunks.group_by_chunk(weights).sum(-1))


def snapkv(q: torch.Tensor, chunks: CandidateChunks, reduce: ReduceFunction) -> torch.Tensor:
    weights = reduce(_attention_weights(q, chunks.keys[..., : chunks.end * chunks.chunk_size, :]))
    pooled = torch.nn.functional.avg_pool1d(weights, SNAPKV_POOL_SIZE, 1, SNAPKV_POOL_SIZE // 2)
    return chunks.group_by_chunk(pooled[..., chunks.start * chunks.chunk_size :]).sum(-1)


@dataclass(frozen=True)
class Scorer:
    """A scorer and the inputs that it needs.

    Attributes:
        score: (queries (Hkv, G, M, d) float32, candidates, reduce) -> (Hkv, chunks) float32.
        summary_kinds: kinds of summaries that ``score`` can read in place of the keys.
        uses_window_queries: whether M is the whole window of tokens; else M is 1, the newest token.
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
    """Scores a layer's chunks.

    Args:
        name: one of ``SCORERS`` except "streaming".
        reduction: how scores of several tokens become one: "mean", "max", or "last" for the newest token alone.
        queries: (Hq, M, d), after RoPE, the newest last, Hq a multiple of Hkv.

    Returns:
        (Hkv, chunks) float32.
    """
    scorer = SCORERS[name]
    assert scorer is not None
    kv_heads = candidates.keys.shape[-3]
    q = queries.float().unflatten(-3, (kv_heads, -1))
    if reduction == "last":
        q = q[..., -1:, :]

    def reduce(x: torch.Tensor) -> torch.Tensor:
        return (x.amax(-2) if reduction == "max" else x.mean(-2)).mean(-2)

    if candidates.summaries is not None and scorer.summary_kinds:
        return scorer.score(q, candidates, reduce)
    # One KV head at a time, because float32 copies of the keys, and attention weights, take much memory.
    by_head = (
        scorer.score(
            q[..., h : h + 1, :, :, :],
            replace(candidates, keys=candidates.keys[..., h : h + 1, :, :], summaries=None),
            reduce,
        )
        for h in range(kv_heads)
    )
    return torch.cat(list(by_head), dim=-2)
