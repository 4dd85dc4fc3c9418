"""The target's KV that a draft sees under retrieval, at true positions.

    sink | retrieved chunks | window | rows since then

Rows are gathered when the choice of chunks has changed, or when the rows since then have filled their room; in between,
new rows are appended. All rows of the text are kept elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from longdraft.memory.store import KVStore
from longdraft.views.cache import Queries, TrueCache
from longdraft.views.retrieval import Retrieval


class RetrievedKV(TrueCache):
    """The target's last-layer KV on the retrieved rows, keys with the RoPE of their true positions.

    Args:
        full: the target's store.
        transposed_keys: the layout that the attention path prefers.

    Raises:
        MemoryBudgetError: it does not fit the memory that is free.
    """

    def __init__(self, full: KVStore, retrieval: Retrieval, transposed_keys: bool) -> None:
        def new_store(slots: int, capacity: int) -> KVStore:
            return KVStore(replace(full.shape, layers=1), slots, capacity, full.device, transposed_keys)

        super().__init__(full, new_store, retrieval.view, 0, first=full.shape.layers - 1, summaries=False)
        self.retrieval = retrieval
        self._versions: list[int | None] = [None] * full.slots

    def _chosen(self, slot: int, end: int, queries: Queries | None) -> torch.Tensor:
        return torch.tensor([[self.retrieval.visible_chunks(slot, end)]], dtype=torch.long, device=self.full.device)

    def forget(self, slot: int, start: int = 0) -> None:
        if start < self._ends[slot]:
            self._versions[slot] = None  # so that the whole window is gathered again
        super().forget(slot, start)

    def read(self, slots: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Returns visible keys and values (slots, Hkv, capacity, d) as tensor views, and the rows of each slot.

        Args:
            slots: are brought up to the rows that can be read now.
        """
        for slot in slots:
            version = self.retrieval.version(slot)
            self.update(slot, due=self._versions[slot] != version)
            self._versions[slot] = version
        return *self.store.layer(0), [self.store.lengths[slot] for slot in slots]
