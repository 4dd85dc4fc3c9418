"""Feeding a tree level by level: into a hosted model, and into the rings of the drafters with a window.

In the latter, linear layers run over the rows of all sequences; attention goes sequence by sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longdraft.drafters.layers import SelfAttend
from longdraft.host.runner import TargetRunner
from longdraft.kv.store import KVStore
from longdraft.trees.level import Level
from longdraft.trees.masks import Ancestors
from longdraft.views.ring import Ring


def feed_level(
    runner: TargetRunner,
    store: KVStore,
    slots: Sequence[int],
    bases: Sequence[int],
    level: Level,
    ancestors: torch.Tensor,
) -> torch.Tensor:
    """Logits (B', W, vocabulary) of what follows each node; its KV lies behind that of the levels before, uncommitted.

    Args:
        bases: position of each sequence's root; a node's is its root's + its depth.
        ancestors: (B', W, S) bool, as :class:`~longdraft.trees.masks.Ancestors` gives it: S nodes were fed, these W
            the last of them.
    """
    batch, width = level.tokens.shape
    depths = [[level.depth] * width] * batch
    offset = ancestors.shape[2] - width
    block = store.block(slots, level.tokens, bases=bases, depths=depths, mask=ancestors, offset=offset)
    out = runner.forward(block, store, check=False)
    assert out.logits is not None
    return out.logits


class LevelAttention:
    """One round of a batch.

    Args:
        slots: of each sequence of the batch.
    """

    def __init__(self, window: Ring, slots: Sequence[int]) -> None:
        self._window, self._slots = window, slots
        self._ancestors = Ancestors()

    def newest(self, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> SelfAttend:
        """The sequences' new tokens enter their rings; each one's last goes on, and sees the whole ring.

        Args:
            rows: indices into the batch.
            starts: position of each sequence's first new token.
            ends: one more than there are sequences: the tokens of sequence i are rows [ends[i], ends[i + 1]).
        """

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            outputs = []
            for i, row in enumerate(rows):
                own = slice(ends[i], ends[i + 1])
                self._window.append(self._slots[row], starts[i], k[:, own], v[:, own])
                outputs.append(self._window.attend_newest(self._slots[row], q[:, i : i + 1]))
            return torch.cat(outputs, dim=1)

        return attend

    def nodes(self, level: Level) -> SelfAttend:
        """The nodes of the next level: each sees the ring, its ancestors and itself."""
        width = level.tokens.shape[1]
        seen = self._ancestors.add(level)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            outputs = []
            for i, row in enumerate(level.rows):
                own = slice(i * width, (i + 1) * width)
                new = q[:, own], k[:, own], v[:, own]
                outputs.append(self._window.attend_level(self._slots[row], *new, seen[i], level.depth))
            return torch.cat(outputs, dim=1)

        return attend
