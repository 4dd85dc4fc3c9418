"""Refreshing a view: its chunks are chosen anew every few verifications, and when there is no room for new rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch


class Refresh:
    """Decides when to choose anew, and keeps the queries that choose. One for a run; slots do not affect each other.

    Args:
        interval: verifications from one choice to the next; 0: only the other rule counts.
        count: the last queries of a text that are kept.
    """

    def __init__(self, interval: int, count: int) -> None:
        self.interval, self._count = interval, count
        # Verifications of each slot since the last choice.
        self._seen: defaultdict[int, int] = defaultdict(int)
        self._queries: dict[int, torch.Tensor] = {}

    def add(self, slot: int, queries: Mapping[int, torch.Tensor]) -> None:
        """Appends queries, layer -> (Hq, n, d), the newest last."""
        new, before = torch.stack(list(queries.values())), self._queries.get(slot)
        queries_so_far = new if before is None else torch.cat([before, new], dim=2)
        self._queries[slot] = queries_so_far[:, :, -self._count :]

    def queries(self, slot: int) -> torch.Tensor | None:
        """Returns (layers, Hq, M, d), M at most ``count``; None if there are none yet."""
        return self._queries.get(slot)

    def note(self, slot: int) -> None:
        """Counts a verification."""
        self._seen[slot] += 1

    def due(self, slot: int) -> bool:
        """True if it is time to choose."""
        return 0 < self.interval <= self._seen[slot]

    def done(self, slot: int) -> None:
        """Called when the slot's view was chosen."""
        self._seen[slot] = 0

    def forget(self, slot: int) -> None:
        """Called when another text begins in the slot."""
        self._queries.pop(slot, None)
        self.done(slot)
