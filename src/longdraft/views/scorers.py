"""Scorers: they rank the chunks of a layer's keys by its queries. A chunk may have one row or many.

Queries are (Hkv, G, M, d): the G query heads of each KV head's group, M tokens. The scores of single queries are
reduced over the M tokens and averaged over the group, so every KV head ranks its own chunks. Sums are float32.

All shapes are those of one layer. Several layers at once have one more dimension in front, and the same results.

========== ======================================================================== =============================
minmax     max(q . Kmax, q . Kmin), of the keys' element-wise largest and smallest  SpecPV, section 3.2
quest      sum_d max(q_d Kmax_d, q_d Kmin_d): no q . k of the chunk is larger       Quest
mean-key   q . mean(K)                                                              TriForce, section 4.1
tokens     the largest q . k of the chunk                                           TokenSwift, section 3
attention  the softmax mass that falls on the chunk, of all rows of the text        SpecExtend, section 2.2
snapkv     the softmax mass of all rows before the window, averaged over neighbours SnapKV; MagicDec, section 4
streaming  none: nothing is chosen                                                  StreamingLLM
========== ======================================================================== =============================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from longdraft.views.summaries import summarise

REDUCTIONS = ("mean", "max", "last")
# Rows over which SnapKV averages.
POOL = 5

# (Hkv, G, M, n) of single queries -> (Hkv, n)
Reduce = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Candidates:
    """The chunks of a layer that are scored.

    Attributes:
        keys: (Hkv, n, d) of the whole text, after RoPE.
        first, behind: chunks [first, behind) are scored.
        chunk: rows of each.
        kept: kind -> (Hkv, chunks, d), summaries of the text's chunks from the first on, so that the keys need not be
            read; None: there are none.
    """

    keys: torch.Tensor
    first: int
    behind: int
    chunk: int
    kept: Mapping[str, torch.Tensor] | None = None

    @property
    def rows(self) -> torch.Tensor:
        """Keys of the chunks, (Hkv, rows, d)."""
        return self.keys[..., self.first * self.chunk : self.behind * self.chunk, :]

    def summary(self, kind: str) -> torch.Tensor:
        """Returns summaries of the chunks, (Hkv, chunks, d)."""
        if self.kept is not None:
            return self.kept[kind][..., self.first : self.behind, :]
        return summarise(kind, self.rows.unflatten(-2, (-1, self.chunk)))

    def by_chunk(self, x: torch.Tensor) -> torch.Tensor:
        """Groups numbers of the chunks' rows: (..., rows) -> (..., chunks, chunk)."""
        return x.unflatten(-1, (-1, self.chunk))


def _dots(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """q . k: queries (Hkv, G, M, d), keys (Hkv, n, d) -> (Hkv, G, M, n)."""
    return (q.flatten(-3, -2) @ keys.float().transpose(-1, -2)).unflatten(-2, q.shape[-3:-1])


def _masses(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The attention weights of each query, (Hkv, G, M, n)."""
    return torch.softmax(_dots(q * q.shape[-1] ** -0.5, keys), -1)


def minmax(q: torch.Tensor, c: Candidates, reduce: Reduce) -> torch.Tensor:
    scores = _dots(q, c.summary("largest"))
    return reduce(torch.maximum(scores, _dots(q, c.summary("smallest")), out=scores))


def quest(q: torch.Tensor, c: Candidates, reduce: Reduce) -> torch.Tensor:
    """For q_d > 0 the largest key counts, for q_d < 0 the smallest: two matrix products."""
    return reduce(_dots(q.clamp(min=0), c.summary("largest")) + _dots(q.clamp(max=0), c.summary("smallest")))


def mean_key(q: torch.Tensor, c: Candidates, reduce: Reduce) -> torch.Tensor:
    if c.kept is not None:
        return reduce(_dots(q, c.summary("mean")))
    return reduce(c.by_chunk(_dots(q, c.rows)).mean(-1))  # the same number: q . k is linear in k


def tokens(q: torch.Tensor, c: Candidates, reduce: Reduce) -> torch.Tensor:
    return reduce(c.by_chunk(_dots(q, c.rows)).amax(-1))


def attention(q: torch.Tensor, c: Candidates, reduce: Reduce) -> torch.Tensor:
    mass = _masses(q, c.keys)[..., c.first * c.chunk : c.behind * c.chunk]
    return reduce(c.by_chunk(mass).sum(-1))


def snapkv(q: torch.Tensor, c: Candidates, reduce: Reduce) -> torch.Tensor:
    mass = reduce(_masses(q, c.keys[..., : c.behind * c.chunk, :]))
    pooled = torch.nn.functional.avg_pool1d(mass, POOL, 1, POOL // 2)
    return c.by_chunk(pooled[..., c.first * c.chunk :]).sum(-1)


@dataclass(frozen=True)
class Scorer:
    """A scorer and what it needs.

    Attributes:
        scores: (queries (Hkv, G, M, d) float32, candidates, reduction) -> (Hkv, chunks) float32.
        summaries: kinds of summaries from which it can score without the keys.
        window: whether the queries of all rows of the window choose, not the newest one alone.
    """

    scores: Callable[[torch.Tensor, Candidates, Reduce], torch.Tensor]
    summaries: tuple[str, ...] = ()
    window: bool = False


SCORERS: dict[str, Scorer | None] = {
    "minmax": Scorer(minmax, ("largest", "smallest")),
    "quest": Scorer(quest, ("largest", "smallest")),
    "mean-key": Scorer(mean_key, ("mean",)),
    "tokens": Scorer(tokens),
    "attention": Scorer(attention),
    "snapkv": Scorer(snapkv, window=True),
    "streaming": None,
}


def score(name: str, reduction: str, queries: torch.Tensor, candidates: Candidates) -> torch.Tensor:
    """Scores a layer's chunks.

    Args:
        name: one of ``SCORERS``, but not "streaming".
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

    if candidates.kept is not None and scorer.summaries:
        return scorer.scores(q, candidates, reduce)
    # One head at a time: float32 copies of all keys, and the masses of all queries, are large.
    each = (
        scorer.scores(
            q[..., h : h + 1, :, :, :],
            replace(candidates, keys=candidates.keys[..., h : h + 1, :, :], kept=None),
            reduce,
        )
        for h in range(heads)
    )
    return torch.cat(list(each), dim=-2)
