"""A round of a drafter that is a hosted language model: a small one, or the target on a part of its KV."""

from __future__ import annotations

import torch

from longdraft.engine.drafter import Drafter
from longdraft.engine.sequence import Sequence
from longdraft.memory.store import KVStore
from longdraft.model.runner import TargetRunner
from longdraft.model.whole_lm import WholeLM
from longdraft.trees.level import Level, likeliest
from longdraft.trees.masks import Ancestors


class HostedRound:
    """One round of a batch, whose forwards take all sequences together. The root is the first node that is fed.

    Args:
        drafter: counts the forwards.
        whole: computes few rows in one kernel call; None: without such kernels.
    """

    def __init__(
        self, drafter: Drafter, runner: TargetRunner, store: KVStore, whole: WholeLM | None, sequences: list[Sequence]
    ) -> None:
        self._drafter, self._runner, self._store, self._whole = drafter, runner, store, whole
        self._sequences, self._ancestors = sequences, Ancestors()

    def root(self, sequence: Sequence) -> int:
        """Position of a sequence's last token."""
        return sequence.length - 1

    def of(self, level: Level) -> list[Sequence]:
        return [self._sequences[row] for row in level.rows]

    def expand(self, level: Level) -> torch.Tensor:
        """Logits (B', W, draft vocabulary) of what follows each node; its KV lies behind that of the levels before."""
        self._drafter.forwards += 1
        (slots, roots), (batch, width) = self._places(level), level.tokens.shape
        depths, mask = [[level.depth] * width] * batch, self._ancestors.add(level)
        offset = mask.shape[2] - width
        block = self._store.block(slots, level.tokens, bases=roots, depths=depths, mask=mask, offset=offset)
        out = self._runner.forward(block, self._store, check=False)
        assert out.logits is not None
        return out.logits

    def likeliest(self, level: Level, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and draft ids (B', W, k) of the likeliest tokens behind each node."""
        if self._whole is None or not self._whole.takes(self._store, level.tokens.numel()):
            return likeliest(self.expand(level), count)
        self._drafter.forwards += 1
        slots, roots = self._places(level)
        positions = [root + level.depth for root in roots]
        return self._whole.nodes(self._store, slots, level.tokens, positions, self._ancestors.add(level), count)

    def _places(self, level: Level) -> tuple[list[int], list[int]]:
        return [s.slot for s in self.of(level)], [self.root(s) for s in self.of(level)]
