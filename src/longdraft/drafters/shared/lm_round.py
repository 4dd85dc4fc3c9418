"""A round of a drafter that is a hosted language model: a small one, or the target on a part of its KV."""

from __future__ import annotations

import torch

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.engine.drafter import Drafter
from longdraft.engine.sequence import Sequence
from longdraft.memory.store import KVStore
from longdraft.model.fused_lm import FusedLM
from longdraft.model.runner import TargetRunner
from longdraft.trees.level import TreeLevel, topk_logprobs
from longdraft.trees.masks import AncestorMask


class LMDraftRound:
    """One round of a batch, whose forwards take all sequences together. The root is the first node that is fed.

    Args:
        drafter: counts the forwards.
        whole: computes few rows in one kernel call; None: without such kernels.
    """

    def __init__(
        self, drafter: Drafter, runner: TargetRunner, store: KVStore, whole: FusedLM | None, sequences: list[Sequence]
    ) -> None:
        self._drafter, self._runner, self._store, self._whole = drafter, runner, store, whole
        self._sequences, self._ancestors = sequences, AncestorMask()

    def root(self, sequence: Sequence) -> int:
        """Position of a sequence's last token."""
        return sequence.length - 1

    def of(self, level: TreeLevel) -> list[Sequence]:
        return [self._sequences[row] for row in level.sequence_indices]

    def expand(self, level: TreeLevel) -> torch.Tensor:
        """Logits (B', W, draft vocabulary) of what follows each node; its KV lies behind that of the levels before."""
        return self._logits(self._block(level))

    def likeliest(self, level: TreeLevel, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and draft ids (B', W, k) of the likeliest tokens behind each node."""
        block = self._block(level)
        if self._whole is None or not self._whole.supports(self._store, level.tokens.numel()):
            return topk_logprobs(self._logits(block), count)
        return self._whole.topk(block, self._store, count)

    def _logits(self, block: ForwardBatch) -> torch.Tensor:
        out = self._runner.forward(block, self._store, check_nan=False)
        assert out.logits is not None
        return out.logits

    def _block(self, level: TreeLevel) -> ForwardBatch:
        """The rows of a forward over a level, which is counted."""
        self._drafter.forwards += 1
        sequences, (batch, width) = self.of(level), level.tokens.shape
        depths, mask = [[level.depth] * width] * batch, self._ancestors.add(level)
        slots, roots = [s.slot for s in sequences], [self.root(s) for s in sequences]
        offset = mask.shape[2] - width
        return self._store.make_forward_batch(
            slots, level.tokens, root_positions=roots, depths=depths, mask=mask, tree_offset=offset
        )
