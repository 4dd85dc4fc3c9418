"""Refreshing a view: its chunks are chosen anew every few verifications, and when there is no room for new rows."""

from __future__ import annotations

from collections import defaultdict


class Refresh:
    """Decides when to choose anew. One for a run; slots do not affect each other.

    Args:
        interval: verifications from one choice to the next; 0: only the other rule counts.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        # Verifications of each slot since the last choice.
        self._seen: defaultdict[int, int] = defaultdict(int)

    def note(self, slot: int) -> None:
        """Counts a verification."""
        self._seen[slot] += 1

    def due(self, slot: int) -> bool:
        """True if it is time to choose."""
        return 0 < self.interval <= self._seen[slot]

    def done(self, slot: int) -> None:
        """Called when the slot's view was chosen, or another text begins there."""
        self._seen[slot] = 0
