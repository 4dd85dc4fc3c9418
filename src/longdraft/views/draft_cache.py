"""KV caches of a draft model: entries at true positions, or selected entries at contiguous positions.

    DraftCache:           the whole context, or its last entries | tree
    RepositionedKVCache:  sink | retrieved chunks | window | new tokens | tree    (SpecExtend, section 2.2)

A forward writes behind the committed entries of the store; only emitted tokens are committed. A DraftCache of the last
entries moves them to its beginning when it is full, so its memory does not depend on the context length.

Positions 0, 1, 2, ... of a RepositionedKVCache never exceed the positions of the draft's training. A second store has
all keys without RoPE. Entries are gathered from it when the selection has changed, or new entries have no room.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from longdraft.memory.store import KVStore
from longdraft.views.retrieval import Retrieval
from longdraft.views.view import View

# Room beyond ``keep_last``, so that entries are moved only once in this many tokens.
SPARE_ENTRIES = 256
# Most prompt tokens of one forward.
PREFILL_CHUNK = 512
# Least room for new tokens behind gathered entries.
MIN_NEW_ENTRIES = 64

# (keys (..., n, d), positions (n,)) -> the keys with RoPE applied, or removed.
RotateFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class DraftCache:
    """A draft's KV cache at true positions.

    Args:
        store: holds the entries.
        scratch: most entries that a round writes behind the committed entries.
        keep_last: how many of the last entries stay when the cache is full; None: the cache holds the whole context.
        window: number of last keys that a query attends to, its own included; None: ``keep_last``.

    Attributes:
        max_new_entries: most emitted tokens that may be processed at once before drafting.
    """

    max_new_entries = MIN_NEW_ENTRIES

    def __init__(self, store: KVStore, scratch: int, keep_last: int | None = None, window: int | None = None) -> None:
        self.store, self.scratch, self.keep_last = store, scratch, keep_last
        self.window = keep_last if window is None else window
        self._first_positions = [0] * store.slots  # of each slot's first entry

    def context_len(self, slot: int) -> int:
        """Number of tokens processed so far."""
        return self._first_positions[slot] + self.store.lengths[slot]

    def next_position(self, slot: int) -> int:
        """Position that RoPE gives to the next entry."""
        return self.context_len(slot)

    def contiguous_suffix_len(self, slot: int) -> int:
        """Returns the number of the context's last tokens that are in the cache without a gap."""
        return self.store.lengths[slot]

    def window_start(self, slot: int, depth: int = 0) -> int:
        """First entry in the window of a query at this depth of a tree."""
        return 0 if self.window is None else max(0, self.store.lengths[slot] - self.window + depth)

    def make_room(self, slot: int, count: int) -> None:
        """Makes room for ``count`` new entries of a round."""
        n = self.store.lengths[slot]
        if self.keep_last is None or n + count <= self.keep_last + SPARE_ENTRIES:
            return
        remaining = max(0, min(n, self.keep_last - count))
        for kv in self.store.slot_kv(slot, slice(None)):
            kv[:, :, :remaining] = kv[:, :, n - remaining : n].clone()
        self._first_positions[slot] += n - remaining
        self.store.lengths[slot] = remaining

    def begin_chunk(self, slot: int, num_tokens: int) -> int:
        """Makes room for the next prefill chunk; returns its length, at most ``num_tokens``."""
        return min(num_tokens, PREFILL_CHUNK)

    def append_positions(self, slot: int, count: int) -> torch.Tensor:
        """Positions (count,) at which :meth:`append` expects RoPE in its next keys."""
        return torch.arange(self.context_len(slot), self.context_len(slot) + count, device=self.store.device)

    def append(self, slot: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Appends and commits entries that were computed outside a forward on the cache.

        Args:
            keys, values: (layers, Hkv, n, d), n at most ``keep_last``.
        """
        self.make_room(slot, keys.shape[2])
        self.store.write_entries(slot, self.store.lengths[slot], keys, values)
        self.commit(slot, keys.shape[2])

    def commit(self, slot: int, count: int) -> None:
        """Commits the first ``count`` scratch entries."""
        self.store.commit(slot, range(count))

    def truncate(self, slot: int, start: int = 0) -> None:
        """Drops entries from position ``start`` on. If none is left, the next entry gets position ``start``."""
        remaining = max(0, start - self._first_positions[slot])
        if remaining > self.store.lengths[slot]:
            remaining = 0  # there would be a gap before ``start``
        self.store.truncate(slot, remaining)
        if not remaining:
            self._first_positions[slot] = start

    def restorable_length(self, slot: int, length: int) -> int:
        """The largest context length, at most ``length``, that :meth:`truncate` can go back to."""
        return self.store.restorable_length(slot, length)


class RepositionedKVCache(DraftCache):
    """A draft's KV cache of selected entries at positions 0, 1, 2, ..., with new tokens behind them.

    Args:
        store: each slot has the gathered entries first, then those of new tokens.
        full_store: keys without RoPE, and values, of all tokens except new ones that are only in ``store``.
        retrieval: selects the entries.
        rotate, unrotate: apply RoPE to keys, and remove it.
        chunk_size: most prompt tokens of one forward, which attends to sink, window and itself.
        prefill_capacity: entries of ``store`` that prefill may use.
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
        self._rotate, self._unrotate = rotate, unrotate
        self._chunk_size, self._prefill_capacity = chunk_size, prefill_capacity
        sink = retrieval.view.sink
        window = max(1, prefill_capacity - sink - chunk_size)
        self._prefill_window = Retrieval(View("streaming", 0, sink, window, shared_by_heads=True))
        self._num_gathered = [0] * store.slots
        # For each slot, the version of the selection whose entries are gathered; None: not those of a selection.
        self._gathered_versions: list[int | None] = [None] * store.slots

    def context_len(self, slot: int) -> int:
        return self.full_store.lengths[slot] + self.store.lengths[slot] - self._num_gathered[slot]

    def next_position(self, slot: int) -> int:
        return self.store.lengths[slot]

    def has_full_context(self, slot: int) -> bool:
        """True if ``store`` has the whole context."""
        return self._num_gathered[slot] == self.full_store.lengths[slot]

    def contiguous_suffix_len(self, slot: int) -> int:
        return min(self.context_len(slot), self.retrieval.view.window)

    def begin_chunk(self, slot: int, num_tokens: int) -> int:
        count = min(num_tokens, self._chunk_size)
        is_full = self.store.lengths[slot] + count > self._prefill_capacity
        if is_full or self._num_gathered[slot] == 0 < self.full_store.lengths[slot]:  # or the cached prefix is missing
            self._gather(slot, self._prefill_window)
            self._gathered_versions[slot] = None
        return count

    def make_room(self, slot: int, count: int) -> None:
        version = self.retrieval.selection_version(slot)
        fits = self.store.lengths[slot] + count <= self.retrieval.view.capacity
        if not fits or not (self.has_full_context(slot) or self._gathered_versions[slot] == version):
            self._gather(slot, self.retrieval)
            self._gathered_versions[slot] = version

    def append_positions(self, slot: int, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.long, device=self.store.device)  # position 0: no RoPE

    def append(self, slot: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        n, count = self.store.lengths[slot], keys.shape[2]
        if n and n + count <= self.retrieval.view.capacity:  # new tokens of a round fit behind the gathered entries
            positions = torch.arange(n, n + count, device=self.store.device)
            self.store.write_entries(slot, n, self._rotate(keys, positions), values)
            self.commit(slot, count)
            return
        self._flush_new_entries(slot)
        self._drop_gathered_entries(slot)
        self._append_to_full(slot, keys, values)

    def restorable_length(self, slot: int, length: int) -> int:
        return length

    def truncate(self, slot: int, start: int = 0) -> None:
        full_len = self.full_store.lengths[slot]
        if start >= full_len:
            self.store.truncate(slot, min(self.store.lengths[slot], self._num_gathered[slot] + start - full_len))
            return
        self.full_store.truncate(slot, start)
        self._drop_gathered_entries(slot)

    def _drop_gathered_entries(self, slot: int) -> None:
        """Empties ``store``, which is filled again when entries are needed."""
        self.store.truncate(slot, 0)
        self._num_gathered[slot], self._gathered_versions[slot] = 0, None

    def _append_to_full(self, slot: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.full_store.write_entries(slot, self.full_store.lengths[slot], keys, values)
        self.full_store.lengths[slot] += keys.shape[2]

    def _flush_new_entries(self, slot: int) -> None:
        """Appends the entries of new tokens to ``full_store``; they count as gathered from then on."""
        start, end = self._num_gathered[slot], self.store.lengths[slot]
        if start < end:
            keys, values = (x[:, slot, :, start:end] for x in (self.store.keys, self.store.values))
            self._append_to_full(slot, self._unrotate(keys, torch.arange(start, end, device=self.store.device)), values)
        self._num_gathered[slot] = end

    def _gather(self, slot: int, retrieval: Retrieval) -> None:
        """Fills ``store`` with the entries that ``retrieval`` selects."""
        self._flush_new_entries(slot)
        indices = retrieval.kv_indices(slot, self.full_store.lengths[slot]).to(self.full_store.device)
        keys, values = (x[:, slot].index_select(2, indices) for x in (self.full_store.keys, self.full_store.values))
        positions = torch.arange(len(indices), device=self.full_store.device)
        self.store.write_entries(slot, 0, self._rotate(keys, positions), values)
        self.store.lengths[slot] = self._num_gathered[slot] = len(indices)
