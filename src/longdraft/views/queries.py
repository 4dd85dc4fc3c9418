"""The last queries of each text, by which its view is chosen."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class LastQueries:
    """Args:
    count: queries that are kept of each text.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._kept: dict[int, torch.Tensor] = {}

    def add(self, slot: int, queries: Mapping[int, torch.Tensor]) -> None:
        """Appends queries, layer -> (Hq, n, d), the newest last."""
        new, before = torch.stack(list(queries.values())), self._kept.get(slot)
        whole = new if before is None else torch.cat([before, new], dim=2)
        self._kept[slot] = whole[:, :, -self._count :]

    def of(self, slot: int) -> torch.Tensor | None:
        """(layers, Hq, M, d), M at most ``count``; None: there are none yet."""
        return self._kept.get(slot)

    def forget(self, slot: int) -> None:
        """Another text begins in the slot."""
        self._kept.pop(slot, None)
