"""Which rows of a text lie in a copy of it, and the copying.

chosen rows | rows [start, end) of the text
"""

from __future__ import annotations

import torch


class Copied:
    """The bookkeeping of the copies of a batch; it holds no keys.

    Args:
        slots: how many texts there are at once.
        room: rows of a copy at most.

    Attributes:
        sizes: rows of each slot's copy.
        ends: rows of each slot's text that it has taken in; the last of the copy's rows is row end - 1.
    """

    def __init__(self, slots: int, room: int) -> None:
        self._room = room
        self.sizes, self.ends = [0] * slots, [0] * slots
        self._starts = [0] * slots

    def whole(self, slot: int) -> bool:
        """Whether all of the text is there."""
        return self._starts[slot] == 0

    def appends(self, slot: int, end: int, due: bool) -> bool:
        """Whether the rows up to ``end`` can be appended to the copy; if not, it has to be chosen anew.

        A copy of chosen rows is forgotten where all of the text would fit.

        Args:
            due: choose anew in any case, unless all of the text is there.
        """
        self.forget(slot, end)
        if self.sizes[slot] + end - self.ends[slot] <= self._room and (not due or self.whole(slot)):
            return True
        if end > self._room:
            return False
        self.forget(slot)  # tokens were taken back, and now there is room for all of the text
        return True

    def append(self, slot: int, end: int) -> tuple[slice, slice]:
        """Counts the rows up to ``end`` as appended: where in the copy, and which rows of the text."""
        size, start = self.sizes[slot], self.ends[slot]
        self.sizes[slot], self.ends[slot] = size + end - start, end
        return slice(size, self.sizes[slot]), slice(start, end)

    def fill(self, slot: int, size: int, start: int, end: int) -> None:
        """Counts a copy of ``size`` rows, of which the last are rows [start, end) of the text."""
        self.sizes[slot], self._starts[slot], self.ends[slot] = size, start, end

    def forget(self, slot: int, start: int = 0) -> None:
        """Told that the text's rows from ``start`` on are others than they were, or gone."""
        if start >= self.ends[slot]:
            return
        if start < self._starts[slot]:
            self.fill(slot, 0, 0, 0)
        else:
            self.fill(slot, self.sizes[slot] - self.ends[slot] + start, self._starts[slot], start)


def gather(source: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows of one layer in one indexed copy.

    Args:
        source: (Hkv, n, d), with any strides.
        rows: (Hkv, m) int64, each KV head's own, or (1, m), the same of all.

    Returns:
        (Hkv, m, d).
    """
    if len(rows) == 1:
        return source.index_select(1, rows[0])
    return source[torch.arange(source.shape[0], device=source.device)[:, None], rows]
