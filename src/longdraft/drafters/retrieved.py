"""What a draft attends to under retrieval: a working set, gathered from all rows of a text (SpecExtend, section 2.2).

    sink | retrieved chunks | recent | rows since then

It is gathered when the choice of chunks has changed, or when the rows behind it have filled its room; in between they
are appended one by one. Nothing is deleted from what it is gathered of. Two kinds: the target's KV at true positions,
which LongSpec's cross-attention reads, and a draft's own keys and values moved to the positions 0, 1, 2, ..., so that
a draft meets no position beyond those of its training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from longdraft.drafters.layers import rotate
from longdraft.drafters.retrieval import ChunkRetrieval
from longdraft.drafters.window import Window
from longdraft.kv.store import KVShape, KVStore

# (T,) numbers of positions -> cos and sin (T, d) of the rotation by so many, unscaled and in float32.
Turns = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class WorkingSets:
    """Which rows lie in each slot's working set, and which are missing; it holds no keys.

    Args:
        room: rows of a working set at most, ``retrieval.most`` or more.
    """

    def __init__(self, retrieval: ChunkRetrieval, slots: int, room: int, device: torch.device | str) -> None:
        self._retrieval, self._room, self._device = retrieval, room, device
        self._versions: list[int | None] = [None] * slots
        self._ends = [0] * slots
        self._sizes = [0] * slots

    def forget(self, slot: int, start: int) -> None:
        """Told that rows from ``start`` on have changed, or may."""
        if start < self._ends[slot]:
            self._versions[slot] = None

    def take(self, slot: int, end: int) -> tuple[int, torch.Tensor]:
        """What to copy so that the working set is one of a text of ``end`` rows; counts as copied.

        Returns:
            How many rows of the set stay as they are, and (n,) the rows that belong behind them.
        """
        version, kept = self._retrieval.version(slot), self._sizes[slot]
        more = end - self._ends[slot]
        if self._versions[slot] == version and more >= 0 and kept + more <= self._room:
            rows = torch.arange(self._ends[slot], end, device=self._device)
        else:
            kept, rows = 0, self._retrieval.rows(slot, end).to(self._device)
        self._versions[slot], self._ends[slot], self._sizes[slot] = version, end, kept + len(rows)
        return kept, rows

    def shift(self, slot: int) -> int:
        """Place in the set less place in the text, of the newest row and all that follow it."""
        return self._sizes[slot] - self._ends[slot]


class RetrievedKV:
    """The target's last-layer KV on the retrieved rows, keys with the RoPE of their true positions.

    Args:
        store: the target's.
        transposed_keys: as the attention path likes them.

    Raises:
        MemoryBudgetError: the working sets do not fit the memory that is free.
    """

    def __init__(self, store: KVStore, retrieval: ChunkRetrieval, transposed_keys: bool) -> None:
        self._store, self.retrieval = store, retrieval
        room = retrieval.most + retrieval.recent
        self._sets = WorkingSets(retrieval, store.slots, room, store.device)
        self.near = KVStore(replace(store.shape, layers=1), store.slots, room, store.device, transposed_keys)

    def begin(self, slot: int) -> None:
        """Told that a new text begins in a slot."""
        self.retrieval.reset(slot)  # a new version, so all will be gathered anew

    def forget(self, slot: int, start: int) -> None:
        """Told that the store's rows from ``start`` on are others than they were."""
        self._sets.forget(slot, start)

    def rewind(self, slot: int) -> None:
        """Told that tokens were taken back: the rows that can be read now are all there are."""
        length = self._store.readable(slot)
        self.retrieval.truncate(slot, length)
        self._sets.forget(slot, length)

    def read(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (Hkv, n, d) of the working set for the rows that can be read now, as views."""
        store, near = self._store, self.near
        kept, rows = self._sets.take(slot, store.readable(slot))
        end = kept + len(rows)
        if len(rows):
            for source, target in zip(store.layer(store.shape.layers - 1), near.layer(0), strict=True):
                target[slot, :, kept:end] = source[slot].index_select(1, rows)
        keys, values = near.layer(0)
        return keys[slot, :, :end], values[slot, :, :end]


class RetrievedWindow(Window):
    """A :class:`Window` that keeps the whole text and attends to a working set of it at compact positions.

    Keys come with the RoPE of their true positions and are kept so. In the working set a key is turned on by the
    difference to its place there, and so are queries and the keys of the tree: rotations compose, and a factor that
    YaRN puts on cos and sin stays as it is.

    Row t of an EAGLE draft holds what the target thought at position t, joined with the next token: chunks of the
    target's positions are the same chunks of rows, and text and rows are of one length.

    Args:
        rows: of the longest text.
        scratch: tree nodes of one round whose K/V are kept.
        room: rows of a working set at most. depth: levels of the deepest tree; a query may so be ``room + depth``
            positions away from a key.
        turns: rotations by differences of positions.
    """

    def __init__(
        self,
        shape: KVShape,
        slots: int,
        rows: int,
        scratch: int,
        device: torch.device | str,
        retrieval: ChunkRetrieval,
        room: int,
        depth: int,
        turns: Turns,
    ) -> None:
        super().__init__(shape, slots, rows, 0, device)
        # Never full: with `depth` rows to spare, nodes of no level lose sight of the oldest keys.
        self.near = Window(shape, slots, room + depth, scratch, device)
        self._sets = WorkingSets(retrieval, slots, room, device)
        self._turns, self._device = turns, device

    def forget(self, slot: int, end: int) -> None:
        super().forget(slot, end)
        self._sets.forget(slot, end)

    def gather(self, slot: int) -> None:
        """Brings a slot's working set up to the newest row."""
        kept, rows = self._sets.take(slot, self.end(slot))
        places = torch.arange(kept, kept + len(rows), device=self._device)
        k, v = (x[slot].index_select(1, rows) for x in (self.keys, self.values))
        self.near.append(slot, kept, self._turned(k, places - rows), v)

    def attend_newest(self, slot: int, q: torch.Tensor) -> torch.Tensor:
        """The newest row's query (Hq, 1, d) sees the whole working set -> (Hq, 1, d)."""
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
        """As :meth:`Window.attend_level`, with the working set for the ring."""
        return self.near.attend_level(slot, self._moved(slot, q), self._moved(slot, k), v, ancestors, depth)

    def _moved(self, slot: int, x: torch.Tensor) -> torch.Tensor:
        """Rows (H, T, d) behind the working set's, at their places there."""
        shift = self._sets.shift(slot)
        return self._turned(x, torch.full((1,), shift, device=self._device)) if shift else x

    def _turned(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """x (H, T, d), turned by (T,) or (1,) positions; in float32 at least."""
        cos, sin = self._turns(by)
        wide = x.float() if x.dtype.itemsize < 4 else x
        return rotate(wide, cos, sin).to(x.dtype)
