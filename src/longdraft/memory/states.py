"""States: what layers without rows for the whole text keep of each sequence, as a KV store sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch


class LayerStates(Protocol):
    """The states of some layers, a slot a sequence. A state holds for the slot's committed rows.

    A forward computes a block's rows in scratch space. :meth:`commit` keeps the accepted ones; what is not committed
    leaves no trace.
    """

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that a slot may take."""

    def prepare(self, slots: Sequence[int], bases: Sequence[int], rows: int) -> None:
        """Makes room before a forward.

        Args:
            bases: for each slot the text row that its unverified rows begin at.
            rows: unverified rows behind it, those of earlier forwards over the same tree included.
        """

    def commit(self, slot: int, start: int, path: Sequence[int]) -> None:
        """Keeps rows of the last block.

        Args:
            start: committed rows before.
            path: indices of rows behind them, strictly increasing.
        """

    def restorable(self, slot: int, length: int) -> int:
        """The largest number of rows, ``length`` at most, that :meth:`truncate` can go back to. 0 always works."""

    def truncate(self, slot: int, length: int) -> None:
        """Goes back to the state after ``length`` rows, which must be restorable."""

    def copy(self, source: int, slot: int, length: int) -> None:
        """Takes over another slot's state after ``length`` rows, which must be restorable there."""

    def adopt(self, other: Any) -> None:
        """Takes over all slots of the same states in a smaller store, which is given up."""

    def save(self, slot: int) -> dict[str, torch.Tensor]:
        """The state of a slot as named tensors on the host, for a file."""

    def load(self, slot: int, tensors: Mapping[str, torch.Tensor], length: int) -> None:
        """Restores what :meth:`save` returned, as the state after ``length`` rows.

        Raises:
            ValueError: the tensors are not those of such a state.
        """
