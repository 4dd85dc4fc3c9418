"""The last queries of each text, which choose its view."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class LastQueries:
    """Keeps the last ``count`` queries of each text."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._kept: dict[int, torch.Tensor] = {}

    def add(self, slot: int, queries: Mapping[int, torch.Tensor]) -> None:
        """Appends queries, layer -> (Hq, n, d), the newest last."""
        new, before = torch.stack(list(queries.values())), self._kept.get(slot)
        queries_so_far = new if before is None else torch.cat([before, new], dim=2)
        self._kept[slot] = queries_so_far[:, :, -self._count :]

    def of(self, slot: int) -> torch.Tensor | None:
        """Returns (layers, Hq, M, d), M at most ``count``; None if there are none yet."""
        return self._kept.get(slot)

    def forget(self, slot: int) -> None:
        """Called when another text begins in the slot."""
        self._kept.pop(slot, None)
