"""The part of a model's own KV that it drafts on: copies of chosen rows, and behind them all rows since then.

    sink | chosen rows | window | rows that were verified since

The copies are exact, each a row of the full store, keys with the RoPE of their true positions. What a draft computes
on them lies behind, uncommitted, and never enters the full store; the rows that a verification leaves there are copied
from it. Until a text is longer than the view and its room for new rows, all of it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from longdraft.drafters.self_views import SparseView
from longdraft.kv.store import KVStore


class SparseCache:
    """The views of a batch; slots do not know of each other.

    Args:
        full: the store with all KV.
        new_store: builds a store from (slots, capacity).
        view: which rows are chosen.
        fresh: new rows that are taken in before the choice is made anew.
        nodes: rows that are drafted behind them at most, the root's included.

    Attributes:
        store: rows ``[0, lengths[slot])`` of a slot are copies. A forward on it needs ``bases``: a row's position is
            not its index.
        chosen: how many times each slot's rows were chosen.

    Raises:
        MemoryBudgetError: it does not fit the memory that is free.
    """

    def __init__(
        self, full: KVStore, new_store: Callable[[int, int], KVStore], view: SparseView, fresh: int, nodes: int
    ) -> None:
        self.full, self.view = full, view
        self._room = view.most + fresh
        # No text has more rows than the full store.
        self.store = new_store(full.slots, min(self._room, full.capacity) + nodes)
        self.chosen = [0] * full.slots
        # The text's rows [start, end) are the last end - start of a slot's; those before `start` were chosen.
        self._starts = [0] * full.slots
        self._ends = [0] * full.slots

    def whole(self, slot: int) -> bool:
        """Whether all of the text is there."""
        return self._starts[slot] == 0

    def follow(self, slot: int, queries: Sequence[torch.Tensor] | None, due: bool) -> bool:
        """Takes in the rows that the full store has gained; chooses anew where there is no room for them.

        Args:
            queries: of each layer, (Hq, M, d): what to choose by; None: the latest rows.
            due: choose in any case, unless all of the text is there.

        Returns:
            Whether rows were chosen.
        """
        end = self.full.readable(slot)
        if self.store.lengths[slot] + end - self._ends[slot] > self._room or (due and not self.whole(slot)):
            if end > self._room:
                self._choose(slot, end, queries)
                return True
            self.forget(slot)  # tokens were taken back, and now there is room for all of the text
        held, new = self.store.lengths[slot], end - self._ends[slot]
        if new:
            # Not through `layer`: a store off the device would fetch whole layers for these few rows.
            for layers in self.full.portions:
                rows = self.full.stored(slot, layers, self.full.capacity)
                for source, target in zip(rows, (self.store.keys, self.store.values), strict=True):
                    target[layers, slot, :, held : held + new] = source[:, :, end - new : end]
            self.store.lengths[slot], self._ends[slot] = held + new, end
        return False

    def forget(self, slot: int, start: int = 0) -> None:
        """Told that the text's rows from ``start`` on are others than they were, or gone."""
        if start >= self._ends[slot]:
            return
        if start < self._starts[slot]:
            start = self._starts[slot] = 0
            self.store.truncate(slot, 0)
        else:
            self.store.truncate(slot, self.store.lengths[slot] - self._ends[slot] + start)
        self._ends[slot] = start

    def _choose(self, slot: int, end: int, queries: Sequence[torch.Tensor] | None) -> None:
        for layer in range(self.full.shape.layers):
            keys, values = (x[slot, :, :end] for x in self.full.layer(layer))
            rows = self.view.rows(keys, None if queries is None else queries[layer])
            count = rows.shape[1]
            for source, target in zip((keys, values), self.store.layer(layer), strict=True):
                for head, own in enumerate(rows):
                    target[slot, head, :count] = source[head].index_select(0, own)
        self.store.lengths[slot] = count
        self._starts[slot], self._ends[slot] = self.view.window_start(end), end
        self.chosen[slot] += 1
