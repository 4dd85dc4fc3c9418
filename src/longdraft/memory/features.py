"""Features: hidden states of the target, one row for each token of a text, for drafters of the EAGLE kind.

A drafter that sees a window reads the last rows of a text and never an older one. So they lie in a ring: row t of a
text is at place t % size, where it overwrites row t - size. If all rows are wanted, the ring is as long as a slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

# Rows of a ring beside those that are read: a text that begins anew, so many tokens further back, finds them.
SPARE = 1024


class KeptRows(NamedTuple):
    """The rows of each text that a ring keeps.

    Attributes:
        back: rows before a text's last one that a drafter reads at most.
        size: rows of the ring: these, those of blocks behind them, and :data:`SPARE`.
    """

    back: int
    size: int


class Features:
    """The features of a store's slots.

    Args:
        states: (slots, size, width), the memory.
        back: rows before a text's last one that are read at most; None: all.

    Attributes:
        size: rows of the ring.
    """

    def __init__(self, states: torch.Tensor, back: int | None = None) -> None:
        self.states, self.back = states, back
        self.size = states.shape[1]
        self._firsts = [0] * states.shape[0]

    def first(self, slot: int) -> int:
        """The first row that a slot still has."""
        return self._firsts[slot]

    def place(self, row: int) -> int:
        """Where a row of a text lies in the ring."""
        return row % self.size

    def row(self, slot: int, row: int) -> torch.Tensor:
        """One row (width,), as a view."""
        return self.states[slot, self.place(row)]

    def read(self, slot: int, start: int, end: int) -> torch.Tensor:
        """Rows [start, end) as (n, width), a view where they lie side by side."""
        parts = [self.states[slot, places] for places, _ in self._parts(start, end - start)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def write(self, slot: int, start: int, rows: torch.Tensor) -> None:
        """Writes rows (n, width) from row ``start`` on; of more than fit the ring, the last ones."""
        end = start + len(rows)
        start = max(start, end - self.size)
        for places, part in self._parts(start, end - start):
            self.states[slot, places] = rows[len(rows) - (end - start) :][part]
        self._firsts[slot] = max(self._firsts[slot], end - self.size)

    def put(self, slot: int, start: int, rows: torch.Tensor) -> None:
        """Like :meth:`write`, into a slot that has no other rows then."""
        self._firsts[slot] = start
        self.write(slot, start, rows)

    def move(self, slot: int, source: torch.Tensor, start: int) -> None:
        """Moves rows to ``start`` and behind it; source: (n,) their numbers, on the device."""
        places = source if self.back is None else source % self.size
        self.write(slot, start, self.states[slot].index_select(0, places))

    def copy(self, source: int, slot: int, start: int, end: int) -> None:
        """Copies the rows among [start, end) that the slot ``source`` has to ``slot``, which has those before."""
        begin = min(end, max(start, self._firsts[source], end - self.size))
        if begin > start:
            self._firsts[slot] = begin
        self.write(slot, begin, self.read(source, begin, end))

    def truncate(self, slot: int, length: int) -> None:
        """Drops all rows after the first ``length``."""
        self._firsts[slot] = min(self._firsts[slot], length)

    def keeps(self, kept: KeptRows | None) -> bool:
        """True if they have as many rows as ``kept`` says; None: all."""
        return self.back is None or (kept is not None and kept.back <= self.back and kept.size <= self.size)

    def read_from(self, length: int) -> int:
        """The first row that a drafter reads of a text of ``length`` rows."""
        return 0 if self.back is None else max(0, length - self.back)

    def reusable(self, slot: int, rows: int, length: int) -> int:
        """The number of a slot's ``rows`` leading rows that a text of ``length`` rows can begin with.

        Those behind are read again: what a drafter reads of the text's end, if some of it is gone.
        """
        read = self.read_from(length)
        return rows if self._firsts[slot] <= read else min(rows, read)

    def _parts(self, start: int, n: int) -> Iterator[tuple[slice, slice]]:
        """The places of rows [start, start + n), and which of these rows they are: one or two pieces."""
        place = self.place(start)
        here = min(n, self.size - place)
        yield slice(place, place + here), slice(0, here)
        if here < n:
            yield slice(0, n - here), slice(here, n)
