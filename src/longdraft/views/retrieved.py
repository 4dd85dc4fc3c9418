"""What a draft attends to under retrieval: the target's KV at true positions, or its own at compact ones.

    sink | retrieved chunks | window | rows since then

It is gathered when the choice of chunks has changed, or when the rows since then have filled its room; in between they
are appended. Nothing is deleted from what it is gathered of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from longdraft.memory.store import KVShape, KVStore
from longdraft.model.key_rotation import turned
from longdraft.views.cache import Queries, TrueCache
from longdraft.views.copied import Copied, gather
from longdraft.views.retrieval import Retrieval
from longdraft.views.window import Window

# (T,) numbers of positions -> cos and sin (T, d) of the rotation by so many, unscaled and in float32.
Turns = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class RetrievedKV(TrueCache):
    """The target's last-layer KV on the retrieved rows, keys with the RoPE of their true positions.

    Args:
        full: the target's.
        transposed_keys: as the attention path likes them.

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
        if start < self._copied.ends[slot]:
            self._versions[slot] = None  # so that all of the window is there again
        super().forget(slot, start)

    def read(self, slots: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Keys and values (slots, Hkv, capacity, d) of what is seen, as views, and how many rows of each slot are.

        Args:
            slots: brought up to the rows that can be read now.
        """
        for slot in slots:
            version = self.retrieval.version(slot)
            self.update(slot, due=self._versions[slot] != version)
            self._versions[slot] = version
        return *self.store.layer(0), [self.store.lengths[slot] for slot in slots]


class CompactWindow(Window):
    """A :class:`~longdraft.views.window.Window` that keeps the whole text and attends to a part of it at positions
    0, 1, 2, ..., so that a draft meets no position beyond those of its training.

    Keys come with the RoPE of their true positions and are kept so. Where they are attended to, a key is turned on by
    the difference to its place there, and so are queries and the keys of the tree: rotations compose, and a factor that
    YaRN puts on cos and sin stays as it is.

    Row t of an EAGLE draft holds what the target thought at position t, joined with the next token: chunks of the
    target's positions are the same chunks of rows, and text and rows are of one length.

    Args:
        rows: of the longest text.
        scratch: tree nodes of one round whose K/V are kept.
        depth: levels of the deepest tree; a query may so be the view's limit + ``depth`` positions away from a key.
        turns: rotations by differences of positions.
    """

    def __init__(
        self,
        shape: KVShape,
        slots: int,
        rows: int,
        scratch: int,
        device: torch.device | str,
        retrieval: Retrieval,
        depth: int,
        turns: Turns,
    ) -> None:
        super().__init__(shape, slots, rows, 0, device)
        self.together = False  # what is seen is gathered and turned slot by slot
        limit = retrieval.view.capacity
        # Never full: with `depth` rows to spare, nodes of no level lose sight of the oldest keys.
        self.near = Window(shape, slots, limit + depth, scratch, device)
        self._copied = Copied(slots, limit)
        self._retrieval, self._turns, self._device = retrieval, turns, device
        self._versions: list[int | None] = [None] * slots

    def forget(self, slot: int, end: int) -> None:
        super().forget(slot, end)
        if end < self._copied.ends[slot]:
            self._versions[slot] = None
        self._copied.forget(slot, end)

    def gather(self, slot: int) -> None:
        """Brings what is seen of a slot up to the newest row."""
        end, version = self.end(slot), self._retrieval.version(slot)
        if self._copied.appends(slot, end, due=self._versions[slot] != version):
            _, new = self._copied.append(slot, end)
            rows = torch.arange(new.start, new.stop, device=self._device)
        else:
            rows = self._retrieval.rows(slot, end).to(self._device)
            self._copied.fill(slot, len(rows), self._retrieval.view.window_start(end), end)
        self._versions[slot] = version
        kept = self._copied.sizes[slot] - len(rows)
        places = torch.arange(kept, kept + len(rows), device=self._device)
        k, v = (gather(x[slot], rows[None]) for x in (self.keys, self.values))
        self.near.append(slot, kept, self._turned(k, places - rows), v)

    def attend_newest(self, slot: int, q: torch.Tensor) -> torch.Tensor:
        """The newest row's query (Hq, 1, d) sees all that is gathered -> (Hq, 1, d)."""
        self.gather(slot)
        return self.near.attend_newest(slot, self._moved(slot, q))

    def attend_level(
        self,
        slot: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        ancestors: torch.Tensor,
        depth: int,
    ) -> torch.Tensor:
        """As :meth:`Window.attend_level`, with what is gathered."""
        return self.near.attend_level(slot, self._moved(slot, q), self._moved(slot, k), v, ancestors, depth)

    def _moved(self, slot: int, x: torch.Tensor) -> torch.Tensor:
        """Rows (H, T, d) behind those gathered, at their places there."""
        shift = self._copied.sizes[slot] - self._copied.ends[slot]
        return self._turned(x, torch.full((1,), shift, device=self._device)) if shift else x

    def _turned(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """x (H, T, d), turned by (T,) or (1,) positions."""
        return turned(x, *self._turns(by))
