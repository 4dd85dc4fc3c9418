"""Scorers: how much the queries of a verification want each block of keys (SpecPV, section 3.2).

A score is of one layer. Queries (Hkv, G, M, d): the query heads of each KV head's group, M tokens. Scores of single
queries (Hkv, G, M, blocks) are reduced over the M queries, then averaged over the group: every KV head ranks its own
blocks. Sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerBlocks:
    """What a scorer may look at: the candidate blocks of one layer and slot.

    Attributes:
        largest, smallest, mean: (Hkv, blocks, d), the blocks' summaries.
        keys: gives (Hkv, rows, d), all committed keys of the slot, for the scorer that reads them.
        first: index of the first candidate block among the slot's blocks.
        block: rows of a block.
    """

    largest: torch.Tensor
    smallest: torch.Tensor
    mean: torch.Tensor
    keys: Callable[[], torch.Tensor]
    first: int
    block: int


# (queries (Hkv, G, M, d), blocks) -> (Hkv, G, M, blocks), float32
Scorer = Callable[[torch.Tensor, LayerBlocks], torch.Tensor]


def minmax(q: torch.Tensor, blocks: LayerBlocks) -> torch.Tensor:
    """The paper's score: max(q . Kmax, q . Kmin)."""
    up, down = (torch.einsum("hgmd,hbd->hgmb", q, x.float()) for x in (blocks.largest, blocks.smallest))
    return torch.maximum(up, down)


def quest(q: torch.Tensor, blocks: LayerBlocks) -> torch.Tensor:
    """Quest's upper bound of any q . k in the block: sum_d max(q_d Kmax_d, q_d Kmin_d).

    Of q_d > 0 the maximum counts, of q_d < 0 the minimum: two matrix products.
    """
    up = torch.einsum("hgmd,hbd->hgmb", q.clamp(min=0), blocks.largest.float())
    return up + torch.einsum("hgmd,hbd->hgmb", q.clamp(max=0), blocks.smallest.float())


def mean_key(q: torch.Tensor, blocks: LayerBlocks) -> torch.Tensor:
    """q . mean(K), as TriForce scores its chunks."""
    return torch.einsum("hgmd,hbd->hgmb", q, blocks.mean.float())


def attention_mass(q: torch.Tensor, blocks: LayerBlocks) -> torch.Tensor:
    """The softmax mass that falls on the block, of all committed keys: the truth that the others estimate, and dear."""
    keys = blocks.keys()
    scores = torch.einsum("hgmd,hnd->hgmn", q * q.shape[-1] ** -0.5, keys.float())
    mass = torch.softmax(scores, -1)
    start = blocks.first * blocks.block
    end = start + blocks.mean.shape[1] * blocks.block
    return mass[..., start:end].unflatten(-1, (-1, blocks.block)).sum(-1)


SCORERS: dict[str, Scorer | None] = {
    "minmax": minmax,
    "quest": quest,
    "mean-key": mean_key,
    "attention": attention_mass,
    "streaming": None,  # nothing is retrieved: sink and window alone
}
REDUCTIONS = ("mean", "max", "last")


def block_scores(scorer: Scorer, reduction: str, queries: torch.Tensor, blocks: LayerBlocks) -> torch.Tensor:
    """Scores of one layer's blocks.

    Args:
        reduction: over the queries: "mean", "max", or "last" (the newest verified token's, which comes last).
        queries: (Hq, M, d), after RoPE.

    Returns:
        (Hkv, blocks) float32.
    """
    kv_heads = blocks.mean.shape[0]
    q = queries.float().reshape(kv_heads, -1, *queries.shape[1:])
    if reduction == "last":
        q = q[:, :, -1:]
    scores = scorer(q, blocks)
    reduced = scores.amax(2) if reduction == "max" else scores.mean(2)
    return reduced.mean(1)
