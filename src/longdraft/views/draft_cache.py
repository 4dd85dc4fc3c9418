"""The keys and values of a draft's own, a slot a text: at true positions, or of chosen rows at compact ones.

    true:     all of the text, or its last rows | tree
    compact:  sink | retrieved chunks | window | new tokens | tree                (SpecExtend, section 2.2)

A forward writes behind the committed rows of the store; only emitted tokens are committed. A cache of the last rows is
moved back to its beginning when they reach the end of their room, so its memory is the same at any length. Compact
positions are 0, 1, 2, ...: a draft meets none beyond those of its training. All keys of the text are then kept a second
time, without a position, and rows are gathered from them when their choice has changed, or when there is no room for
new ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from longdraft.memory.store import KVStore
from longdraft.views.retrieval import Retrieval
from longdraft.views.view import View

# Rows beside the last ones: they are moved once in this many tokens.
SPARE_ENTRIES = 256
# Tokens of a prompt that are read in one forward.
PREFILL_CHUNK = 512
# Tokens that may be appended to gathered rows before they are gathered anew; more if a tree is deeper.
MIN_NEW_ENTRIES = 64

# Keys (..., n, d) and positions (n,) -> the keys, turned by these positions.
RotateFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class DraftCache:
    """Rows at their true positions.

    Args:
        store: holds them.
        scratch: rows that a round writes behind the text.
        keep_last: rows that stay when there is no room for more; None: there is room for any text.
        window: keys that a query sees, its own included; None: as many as stay.

    Attributes:
        max_new_entries: tokens that may be fed at once before drafting.
    """

    max_new_entries = MIN_NEW_ENTRIES

    def __init__(self, store: KVStore, scratch: int, keep_last: int | None = None, window: int | None = None) -> None:
        self.store, self.scratch, self.keep_last = store, scratch, keep_last
        self.window = keep_last if window is None else window
        self._firsts = [0] * store.slots  # position of each slot's first row

    def context_len(self, slot: int) -> int:
        """Tokens of the text that were read."""
        return self._firsts[slot] + self.store.lengths[slot]

    def next_position(self, slot: int) -> int:
        """Position of the next row."""
        return self.context_len(slot)

    def contiguous_suffix_len(self, slot: int) -> int:
        """The last rows of the text that are there, one behind the other."""
        return self.store.lengths[slot]

    def window_start(self, slot: int, depth: int = 0) -> int:
        """The first row that a query sees; nodes of a tree see fewer of the oldest rows the deeper they are."""
        return 0 if self.window is None else max(0, self.store.lengths[slot] - self.window + depth)

    def make_room(self, slot: int, count: int) -> None:
        """Makes room for ``count`` new rows of a round."""
        n = self.store.lengths[slot]
        if self.keep_last is None or n + count <= self.keep_last + SPARE_ENTRIES:
            return
        kept = max(0, min(n, self.keep_last - count))
        for rows in self.store.slot_kv(slot, slice(None)):
            rows[:, :, :kept] = rows[:, :, n - kept : n].clone()
        self._firsts[slot] += n - kept
        self.store.lengths[slot] = kept

    def begin_chunk(self, slot: int, num_tokens: int) -> int:
        """Makes room for the next piece of a text that is read; returns how many of ``num_tokens`` tokens it may have."""
        return min(num_tokens, PREFILL_CHUNK)

    def append_positions(self, slot: int, count: int) -> torch.Tensor:
        """The positions (count,) at which :meth:`append` takes keys."""
        return torch.arange(self.context_len(slot), self.context_len(slot) + count, device=self.store.device)

    def append(self, slot: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Commits rows of the text that were computed elsewhere.

        Args:
            keys, values: (layers, Hkv, n, d), n at most the rows that stay.
        """
        self.make_room(slot, keys.shape[2])
        self.store.write_entries(slot, self.store.lengths[slot], keys, values)
        self.commit(slot, keys.shape[2])

    def commit(self, slot: int, count: int) -> None:
        """Commits the next ``count`` rows behind the others."""
        self.store.commit(slot, range(count))

    def truncate(self, slot: int, start: int = 0) -> None:
        """Forgets the text's rows from ``start`` on. If none is left, the next row is ``start``."""
        kept = max(0, start - self._firsts[slot])
        if kept > self.store.lengths[slot]:
            kept = 0
        self.store.truncate(slot, kept)
        if not kept:
            self._firsts[slot] = start

    def restorable_length(self, slot: int, length: int) -> int:
        """The largest number of a text's tokens, ``length`` at most, that :meth:`truncate` can leave."""
        return self.store.restorable_length(slot, length)


class RepositionedKVCache(DraftCache):
    """Chosen rows at positions 0, 1, 2, ..., and new tokens behind them.

    Args:
        store: a slot's first rows are gathered, the committed rows behind them are new.
        full_store: keys without a position, and values, of all tokens but the new ones.
        retrieval: chooses the rows.
        turn, back: turn keys without a position to places, and back.
        piece: tokens of a text that are read in one forward, behind a sliding window of the store.
        reach: rows of the store while a text is read.
    """

    def __init__(
        self,
        store: KVStore,
        full_store: KVStore,
        scratch: int,
        retrieval: Retrieval,
        rotate: RotateFunction,
        unrotate: RotateFunction,
        chunk_size: int = PREFILL_CHUNK,
        prefill_capacity: int = 0,
    ) -> None:
        super().__init__(store, scratch)
        self.full_store, self.retrieval, self.max_new_entries = full_store, retrieval, retrieval.view.max_new
        self._turn, self._back, self._piece, self._reach = rotate, unrotate, chunk_size, prefill_capacity
        sink = retrieval.view.sink
        self._reading = Retrieval(
            View("streaming", 0, sink, max(1, prefill_capacity - sink - chunk_size), shared_by_heads=True)
        )
        self._gathered = [0] * store.slots
        # Version of the choice that the rows were gathered by; None: others are there.
        self._versions: list[int | None] = [None] * store.slots

    def context_len(self, slot: int) -> int:
        return self.full_store.lengths[slot] + self.store.lengths[slot] - self._gathered[slot]

    def next_position(self, slot: int) -> int:
        return self.store.lengths[slot]

    def has_full_context(self, slot: int) -> bool:
        """True if all of the text is there."""
        return self._gathered[slot] == self.full_store.lengths[slot]

    def contiguous_suffix_len(self, slot: int) -> int:
        return min(self.context_len(slot), self.retrieval.view.window)

    def begin_chunk(self, slot: int, num_tokens: int) -> int:
        count = min(num_tokens, self._piece)
        if self.store.lengths[slot] + count > self._reach or (
            self._gathered[slot] == 0 < self.full_store.lengths[slot]
        ):
            self._gather(slot, self._reading)
            self._versions[slot] = None
        return count

    def make_room(self, slot: int, count: int) -> None:
        version = self.retrieval.selection_version(slot)
        room = self.store.lengths[slot] + count <= self.retrieval.view.capacity
        if not room or not (self.has_full_context(slot) or self._versions[slot] == version):
            self._gather(slot, self.retrieval)
            self._versions[slot] = version

    def append_positions(self, slot: int, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.long, device=self.store.device)

    def append(self, slot: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        n, count = self.store.lengths[slot], keys.shape[2]
        if n and n + count <= self.retrieval.view.capacity:  # new rows of a round
            places = torch.arange(n, n + count, device=self.store.device)
            self.store.write_entries(slot, n, self._turn(keys, places), values)
            self.commit(slot, count)
            return
        self._settle(slot)
        self._drop(slot)
        self._keep(slot, keys, values)

    def restorable_length(self, slot: int, length: int) -> int:
        return length

    def truncate(self, slot: int, start: int = 0) -> None:
        kept = self.full_store.lengths[slot]
        if start >= kept:
            self.store.truncate(slot, min(self.store.lengths[slot], self._gathered[slot] + start - kept))
            return
        self.full_store.truncate(slot, start)
        self._drop(slot)

    def _drop(self, slot: int) -> None:
        """Drops the gathered rows: they are gathered anew when they are needed."""
        self.store.truncate(slot, 0)
        self._gathered[slot], self._versions[slot] = 0, None

    def _keep(self, slot: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.full_store.write_entries(slot, self.full_store.lengths[slot], keys, values)
        self.full_store.lengths[slot] += keys.shape[2]

    def _settle(self, slot: int) -> None:
        """Moves new tokens' rows to the whole text."""
        start, end = self._gathered[slot], self.store.lengths[slot]
        if start < end:
            keys, values = (x[:, slot, :, start:end] for x in (self.store.keys, self.store.values))
            self._keep(slot, self._back(keys, torch.arange(start, end, device=self.store.device)), values)
        self._gathered[slot] = end

    def _gather(self, slot: int, retrieval: Retrieval) -> None:
        """Fills the store with the chosen rows."""
        self._settle(slot)
        rows = retrieval.kv_indices(slot, self.full_store.lengths[slot]).to(self.full_store.device)
        keys, values = (x[:, slot].index_select(2, rows) for x in (self.full_store.keys, self.full_store.values))
        places = torch.arange(len(rows), device=self.full_store.device)
        self.store.write_entries(slot, 0, self._turn(keys, places), values)
        self.store.lengths[slot] = self._gathered[slot] = len(rows)
