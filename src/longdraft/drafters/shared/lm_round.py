"""One round of a drafter that is a whole language model: a small one, or the target on a part of its KV."""

from __future__ import annotations

import torch

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.drafts.fused_lm import FusedLM
from longdraft.engine.drafter import Drafter
from longdraft.engine.sequence import Sequence
from longdraft.memory.store import KVStore
from longdraft.model.runner import TargetRunner
from longdraft.trees.level import TreeLevel, logits_or_topk
from longdraft.trees.masks import AncestorMask


class LMDraftRound:
    """Drafts the trees of one round. One forward feeds a level of all B sequences, W nodes each. The roots come first.

    Args:
        drafter: counts the forwards in ``drafter.forwards``.
        model: the draft model's runner.
        store: KV cache of the draft model.
        fused_lm: computes forwards of few tokens in one call of our CPU kernels; None if they do not support the model.
        sequences: the batch.
    """

    def __init__(
        self, drafter: Drafter, model: TargetRunner, store: KVStore, fused_lm: FusedLM | None, sequences: list[Sequence]
    ) -> None:
        self._drafter, self._runner, self._store, self._fused_lm = drafter, model, store, fused_lm
        self._sequences, self._ancestors = sequences, AncestorMask()

    def root_position(self, sequence: Sequence) -> int:
        """Returns the position of a sequence's last token, which is the root of the sequence's tree."""
        return sequence.length - 1

    def sequences_of(self, level: TreeLevel) -> list[Sequence]:
        """Returns the sequences that have nodes in a level."""
        return [self._sequences[i] for i in level.sequence_indices]

    def logits_or_topk(self, level: TreeLevel, top_k: int) -> tuple[torch.Tensor, ...]:
        """Feeds a level to the draft; see :data:`~longdraft.trees.level.LogitsOrTopk`."""
        batch = self._forward_batch(level)
        if top_k and self._fused_lm is not None and self._fused_lm.supports(self._store, level.tokens.numel()):
            return self._fused_lm.topk(batch, self._store, top_k)
        out = self._runner.forward(batch, self._store, check_nan=False)
        assert out.logits is not None
        return logits_or_topk(out.logits, top_k)

    def _forward_batch(self, level: TreeLevel) -> ForwardBatch:
        """Makes the batch of a level, and counts a forward. The level's KV is written after that of earlier levels."""
        self._drafter.forwards += 1
        sequences, (batch_size, width) = self.sequences_of(level), level.tokens.shape
        slots, root_positions = [s.slot for s in sequences], [self.root_position(s) for s in sequences]
        depths, mask = [[level.depth] * width] * batch_size, self._ancestors.add(level)
        num_earlier_nodes = mask.shape[2] - width
        return self._store.make_forward_batch(
            slots, level.tokens, root_positions=root_positions, depths=depths, mask=mask, tree_offset=num_earlier_nodes
        )
