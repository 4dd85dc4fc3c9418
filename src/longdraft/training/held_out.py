"""The held-out documents that a run measures on: shared out among its processes, and read when they are needed."""

from __future__ import annotations

from collections.abc import Iterator

from longdraft.training.ahead import Ahead, FeatureSource
from longdraft.training.features import Features

# Bytes of features that a process keeps in memory; what goes beyond is read anew for every measurement.
ROOM = 1 << 30


class HeldOut:
    """One process's share of the documents of a source.

    All processes get equally many, because a sharded module computes in all of them or in none. So that it works out,
    the last ones may get a document that another process counts.

    Args:
        count: documents of the source.
        share: (i, n): every n-th of them from the i-th on.
        room: bytes of features that are kept; 0 if all processes must read equally often.
    """

    def __init__(
        self, source: FeatureSource, count: int, ahead: Ahead, share: tuple[int, int] = (0, 1), room: int = ROOM
    ) -> None:
        self.source, self.count, self._ahead = source, count, ahead
        (first, of) = share
        self._mine = range(first, -(-count // of) * of, of)
        self._kept: dict[int, Features] = {}
        self._room = room

    def __len__(self) -> int:
        """Documents of all processes."""
        return self.count

    def __iter__(self) -> Iterator[tuple[Features, bool]]:
        """The features of each document of the share, and whether this process counts it."""
        missing = [i for i in self._mine if i not in self._kept]
        read = self._ahead.read(self.source, [(i % self.count,) for i in missing])
        for i in self._mine:
            features = self._kept.get(i) or self._keep(i, next(read)[0])
            yield features, i < self.count

    def _keep(self, i: int, features: Features) -> Features:
        size = sum(t.numel() * t.element_size() for t in features.tensors)
        if size <= self._room:
            self._room -= size
            self._kept[i] = features.on_host()
        return features
