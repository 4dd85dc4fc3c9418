"""Scorers rank chunks of KV entries by a layer's queries. A chunk has one entry or more.

Queries are (Hkv, G, M, d): the G query heads of each KV head's group, M tokens. Scores of single queries are reduced
over the M tokens and averaged over the group, so each KV head ranks its own chunks. Sums are float32.

Shapes are those of one layer. Several layers at once have a first dimension more, and the same results.

========== ======================================================================== =============================
minmax     max(q . Kmax, q . Kmin), element-wise maximum and minimum of the keys    SpecPV, section 3.2
quest      sum_d max(q_d Kmax_d, q_d Kmin_d), an upper bound on q . k               Quest
mean-key   q . mean(K)                                                              TriForce, section 4.1
tokens     the largest q . k of the chunk                                           TokenSwift, section 3
attention  the chunk's attention weights, softmax over the whole context            SpecExtend, section 2.2
snapkv     the same, softmax over all before the window, with average pooling       SnapKV; MagicDec, section 4
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

# Scores of single queries (Hkv, G, M, n) -> (Hkv, n)
ReduceFunction = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class CandidateChunks:
    """The chunks of a layer that are scored.

    Attributes:
        keys: (Hkv, n, d) of the whole context, after RoPE.
        start, end: chunks [start, end) are scored.
        chunk_size: entries of a chunk.
        summaries: kind -> (Hkv, chunks, d), of all chunks from chunk 0 on, read in place of the keys; None: read keys.
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


def minmax(q: torch.Tensor, c: CandidateChunks, reduce: ReduceFunction) -> torch.Tensor:
    scores = _dot_products(q, c.summary("largest"))
    return reduce(torch.maximum(scores, _dot_products(q, c.summary("smallest")), out=scores))


def quest(q: torch.Tensor, c: CandidateChunks, reduce: ReduceFunction) -> torch.Tensor:
    """Uses the largest keys where q_d > 0, the smallest where q_d < 0: two matrix products."""
    return reduce(
        _dot_products(q.clamp(min=0), c.summary("largest")) + _dot_products(q.clamp(max=0), c.summary("smallest"))
    )


def mean_key(q: torch.Tensor, c: CandidateChunks, reduce: ReduceFunction) -> torch.Tensor:
    if c.summaries is not None:
        return reduce(_dot_products(q, c.summary("mean")))
    return reduce(c.group_by_chunk(_dot_products(q, c.chunk_keys)).mean(-1))  # equal, for q . k is linear in k


def tokens(q: torch.Tensor, c: CandidateChunks, reduce: ReduceFunction) -> torch.Tensor:
    return reduce(c.group_by_chunk(_dot_products(q, c.chunk_keys)).amax(-1))


def attention(q: torch.Tensor, c: CandidateChunks, reduce: ReduceFunction) -> torch.Tensor:
    mass = _attention_weights(q, c.keys)[..., c.start * c.chunk_size : c.end * c.chunk_size]
    return reduce(c.group_by_chunk(mass).sum(-1))


def snapkv(q: torch.Tensor, c: CandidateChunks, reduce: ReduceFunction) -> torch.Tensor:
    mass = reduce(_attention_weights(q, c.keys[..., : c.end * c.chunk_size, :]))
    pooled = torch.nn.functional.avg_pool1d(mass, SNAPKV_POOL_SIZE, 1, SNAPKV_POOL_SIZE // 2)
    return c.group_by_chunk(pooled[..., c.start * c.chunk_size :]).sum(-1)


@dataclass(frozen=True)
class Scorer:
    """A scorer and the inputs that it needs.

    Attributes:
        score: (queries (Hkv, G, M, d) float32, candidates, reduction) -> (Hkv, chunks) float32.
        summary_kinds: summaries that it can score by, in place of the keys.
        uses_window_queries: whether it uses the queries of the whole window; else the newest query alone.
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
        reduction: over the tokens: "mean", "max", or "last" for the newest token alone.
        queries: (Hq, M, d), after RoPE, the newest last, Hq a multiple of Hkv.

    Returns:
        (Hkv, chunks) float32.
    """
    scorer = SCORERS[name]
    assert scorer is not None
    heads = candidates.keys.shape[-3]
    q = queries.float().unflatten(-3, (heads, -1))
    if reduction == "last":
        q = q[..., -1:, :]

    def reduce(x: torch.Tensor) -> torch.Tensor:
        return (x.amax(-2) if reduction == "max" else x.mean(-2)).mean(-2)

    if candidates.summaries is not None and scorer.summary_kinds:
        return scorer.score(q, candidates, reduce)
    # One KV head at a time: float32 copies of all keys, and the weights of all queries, are large.
    by_head = (
        scorer.score(
            q[..., h : h + 1, :, :, :],
            replace(candidates, keys=candidates.keys[..., h : h + 1, :, :], summaries=None),
            reduce,
        )
        for h in range(heads)
    )
    return torch.cat(list(by_head), dim=-2)
