"""Copies of some rows of a text: which rows a copy holds, and the copying.

A copy holds: chosen rows | rows [start, end) of the text
"""

from __future__ import annotations

import torch


class Copied:
    """Keeps track of which rows the copies of a batch hold; it holds no keys.

    Args:
        slots: texts at once.
        room: rows of a copy at most.

    Attributes:
        sizes: rows of each slot's copy.
        ends: end of each slot's text in its copy: the copy's last row is row end - 1.
    """

    def __init__(self, slots: int, room: int) -> None:
        self._room = room
        self.sizes, self.ends = [0] * slots, [0] * slots
        self._starts = [0] * slots

    def whole(self, slot: int) -> bool:
        return self._starts[slot] == 0

    def appends(self, slot: int, end: int, due: bool) -> bool:
        """True if the rows up to ``end`` can be appended to the copy; if not, its rows have to be chosen anew.

        Forgets a copy of chosen rows if all of the text would fit.

        Args:
            due: choose anew in any case, unless the copy holds all of the text.
        """
        self.forget(slot, end)
        if self.sizes[slot] + end - self.ends[slot] <= self._room and (not due or self.whole(slot)):
            return True
        if end > self._room:
            return False
        self.forget(slot)  # tokens were taken back, and now all of the text fits
        return True

    def append(self, slot: int, end: int) -> tuple[slice, slice]:
        """Records that the rows up to ``end`` are appended; returns their place in the copy, and in the text."""
        size, start = self.sizes[slot], self.ends[slot]
        self.sizes[slot], self.ends[slot] = size + end - start, end
        return slice(size, self.sizes[slot]), slice(start, end)

    def fill(self, slot: int, size: int, start: int, end: int) -> None:
        """Records a copy of ``size`` rows, the last of which are rows [start, end) of the text."""
        self.sizes[slot], self._starts[slot], self.ends[slot] = size, start, end

    def forget(self, slot: int, start: int = 0) -> None:
        """Called when the text's rows from ``start`` on have been replaced or removed."""
        if start >= self.ends[slot]:
            return
        if start < self._starts[slot]:
            self.fill(slot, 0, 0, 0)
        else:
            self.fill(slot, self.sizes[slot] - self.ends[slot] + start, self._starts[slot], start)


def gather(source: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Copies rows of a layer at once, or of several layers, whose dimension comes first.

    Args:
        source: (Hkv, n, d), with any strides.
        rows: (Hkv, m) int64, each KV head's own, or (1, m), the same for all.

    Returns:
        (Hkv, m, d).
    """
    outer = len(source.shape) - 2
    if rows.shape[:-1].numel() == 1:
        return source.index_select(outer, rows.flatten())
    sizes = enumerate(source.shape[:outer])
    places = [torch.arange(n, device=source.device).view(-1, *[1] * (outer - i)) for i, n in sizes]
    index = (*places, rows)
    return source[index]
