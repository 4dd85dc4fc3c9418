"""Self-attention of a round's rows in the rings of a batch: what the drafters with a window share.

Linear layers run over the rows of all sequences; attention goes sequence by sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longdraft.drafters.layers import SelfAttend
from longdraft.drafters.window import Window
from longdraft.trees.beam import Level


class LevelAttention:
    """One round of a batch.

    Args:
        slots: of each sequence of the batch.
    """

    def __init__(self, window: Window, slots: Sequence[int]) -> None:
        self._window, self._slots = window, slots
        # For each sequence, (W, S) bool: which of the S nodes fed so far the W of the last level descend from.
        self._ancestors: dict[int, torch.Tensor] = {}

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
        itself = torch.eye(width, dtype=torch.bool, device=level.tokens.device)
        for i, row in enumerate(level.rows):
            above = self._ancestors.get(row)
            inherited = itself[:, :0] if above is None else above[level.parents[i]]
            self._ancestors[row] = torch.cat([inherited, itself], dim=1)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            outputs = []
            for i, row in enumerate(level.rows):
                own = slice(i * width, (i + 1) * width)
                seen = self._ancestors[row]
                out = self._window.attend_level(self._slots[row], q[:, own], k[:, own], v[:, own], seen, level.depth)
                outputs.append(out)
            return torch.cat(outputs, dim=1)

        return attend
