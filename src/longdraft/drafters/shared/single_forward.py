"""Rounds of drafts that draft all levels of a tree in one forward: P-EAGLE, DFlash and DSpark.

The forward gives the likeliest tokens of each level. A level's probabilities may then be corrected by the tokens of the
path to each node. Shapes: B sequences, W nodes of a level for each sequence, M candidates of a level.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch

from longdraft.drafters.shared.block_drafter import BlockDrafter
from longdraft.drafters.shared.draft_round import DraftRound
from longdraft.engine.sequence import Sequence
from longdraft.trees.level import TreeLevel

NUM_CANDIDATES = 24  # the likeliest tokens before the correction; the others count in the normalization, uncorrected


class LevelTopk(NamedTuple):
    """The M candidates of each level for B sequences, before the correction.

    Attributes:
        logprobs, ids: (B, levels, M) log-probabilities and draft ids.
        rest_logprob: (B, levels, 1) log-probability of all other tokens together.
        correction_inputs: (B, levels, ...) tensor that :meth:`SingleForwardRound.corrected_scores` needs.
    """

    logprobs: torch.Tensor
    ids: torch.Tensor
    rest_logprob: torch.Tensor
    correction_inputs: torch.Tensor


class SingleForwardRound(DraftRound):
    """Drafts the trees of one round with one forward, and corrects each level by the paths' tokens."""

    level_cost = 0.1  # a mask token in the same forward, and a correction

    def __init__(self, drafter: BlockDrafter, sequences: list[Sequence], depth: int) -> None:
        super().__init__(drafter, sequences, depth)
        self._roots: TreeLevel | None = None  # the level of the roots
        self._topk: LevelTopk | None = None  # the forward's result for all levels

    @abstractmethod
    def forward_all_levels(self, level: TreeLevel, k: int) -> tuple[torch.Tensor, ...]:
        """Runs the forward; returns ``logprobs``, ``ids`` and ``correction_inputs`` of a :class:`LevelTopk`.
        ``level``: the roots. ``k``: number of candidates of a level."""

    def corrected_scores(self, level: TreeLevel, topk: LevelTopk) -> torch.Tensor:
        """Returns unnormalized log-probabilities (B, W, M) of the candidates as children of each node of ``level``.
        ``topk``: the candidates of the next level, for the sequences of ``level``. Here they are not corrected."""
        return topk.logprobs.expand(-1, level.tokens.shape[1], -1)

    @property
    def num_candidates(self) -> int:
        """Number of candidates of a level."""
        return NUM_CANDIDATES

    def logits_or_topk(self, level: TreeLevel, top_k: int) -> tuple[torch.Tensor, ...]:
        """Returns log-probabilities and draft ids of the ``top_k`` best children; ``top_k`` must not be 0."""
        assert top_k, "one forward for all levels gives no logits of all tokens"
        if level.depth == 0:
            self._drafter.forwards += 1
            logprobs, ids, correction_inputs = self.forward_all_levels(level, max(top_k, self.num_candidates))
            # The clamp keeps log1p finite if rounding makes the sum 1.
            rest_logprob = torch.log1p(-logprobs.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))
            if logprobs.shape[-1] == self._bound.block.shape.vocabulary:  # there are no other tokens
                rest_logprob.fill_(float("-inf"))
            self._roots, self._topk = level, LevelTopk(logprobs, ids, rest_logprob, correction_inputs)
        assert self._roots is not None and self._topk is not None
        selected = (self._roots.index_select(level.sequence_indices, x) for x in self._topk)
        topk = LevelTopk(*(x[:, level.depth, None] for x in selected))
        scores = self.corrected_scores(level, topk)
        total = torch.logaddexp(scores.logsumexp(-1, keepdim=True), topk.rest_logprob)
        best = scores.topk(min(top_k, scores.shape[-1]), dim=-1)
        return best.values - total, topk.ids.expand_as(scores).gather(2, best.indices)
