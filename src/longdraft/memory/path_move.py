"""Moves the KV entries of an accepted path into place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longdraft.attention.transfer import to_device


class PathMove:
    """Moves the entries of an accepted path behind the committed entries, in path order.

    Entries at the path's beginning that are already in place (all entries of a chain) are not moved.

    Args:
        start: number of entries before the path's first entry.
        path: indices of the accepted entries, counted from ``start``, strictly increasing.
        device: device of most of the tensors.

    Attributes:
        start: the first entry that is overwritten.
    """

    def __init__(self, start: int, path: Sequence[int], device: torch.device) -> None:
        num_in_place = next((i for i, index in enumerate(path) if index != i), len(path))
        self.start = start + num_in_place
        self._target = slice(self.start, start + len(path))
        self._source = [start + index for index in path[num_in_place:]]
        if self._source:
            self._source_t = to_device(self._source, device)

    def __bool__(self) -> bool:
        """True if an entry has to be moved."""
        return bool(self._source)

    def apply(self, entries: torch.Tensor) -> None:
        """Moves entries in a tensor (..., entries, size)."""
        dim = len(entries.shape) - 2
        target = (*[slice(None)] * dim, self._target)
        entries[target] = entries.index_select(dim, self._source_t.to(entries.device))
