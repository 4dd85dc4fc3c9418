"""KV caches of a draft model: entries at true positions, or selected entries at contiguous positions.

    DraftCache:           the whole context, or only the last entries | tree
    RepositionedKVCache:  sink | retrieved chunks | window | new tokens | tree    (SpecExtend, section 2.2)

A forward writes scratch entries behind the committed entries of the store; only emitted tokens are committed. If a
DraftCache keeps only the last entries, its memory does not depend on the context length.

Positions 0, 1, 2, ... of a RepositionedKVCache never exceed the positions of the draft's training. A second store, the
full store, has all keys without RoPE. Entries are gathered from the full store when the selection has changed, or when
``store`` has no space for new entries. Shapes: Hkv KV heads, n tokens, head size d.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from longdraft.attention.transfer import to_device
from longdraft.memory.store import KVStore
from longdraft.views.retrieval import Retrieval
from longdraft.views.view import View

# Space beyond ``keep_last`` entries, so that entries are moved at most once in about this many tokens.
SPARE_ENTRIES = 256
# Most prompt tokens of one draft forward.
PREFILL_CHUNK = 512
# Minimum space for new tokens behind gathered entries, so that a gather serves several rounds.
MIN_NEW_ENTRIES = 64

# (keys (..., n, d), positions (n,)) -> the keys after RoPE is applied, or after RoPE is removed.
RotateFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class DraftCache:
    """A draft's KV cache at true positions.

    Args:
        store: the KV store with the entries.
        scratch: maximum number of entries that a round writes behind the committed entries.
        keep_last: number of last entries that stay when the cache is full; None: the cache holds the whole context.
        window: number of last keys that a query attends to, including the query's own key; None: ``keep_last``.

    Attributes:
        max_new_entries: maximum number of emitted tokens that one forward adds before drafting.
    """

    max_new_entries = MIN_NEW_ENTRIES

    def __init__(self, store: KVStore, scratch: int, keep_last: int | None = None, window: int | None = None) -> None:
        self.store, self.scratch, self.keep_last = store, scratch, keep_last
        self.window = keep_last if window is None else window
        self._first_positions = [0] * store.slots  # position of the first entry of each slot

    def context_len(self, slot: int) -> int:
        """Returns the number of tokens processed so far."""
        return self._first_positions[slot] + self.store.lengths[slot]

    def next_position(self, slot: int) -> int:
        """Returns the RoPE position of the next entry."""
        return self.context_len(slot)

    def contiguous_suffix_len(self, slot: int) -> int:
        """Returns the number of the context's last tokens that are in the cache without a gap."""
        return self.store.lengths[slot]

    def window_start(self, slot: int, depth: int = 0) -> int:
        """Returns the first entry that a query at depth ``depth`` of a tree attends to."""
        return 0 if self.window is None else max(0, self.store.lengths[slot] - self.window + depth)

    def make_room(self, slot: int, num_new: int) -> None:
        """Makes space for ``num_new`` entries of a round. If the slot is full, moves the last entries to its start."""
        length = self.store.lengths[slot]
        if self.keep_last is None or length + num_new <= self.keep_last + SPARE_ENTRIES:
            return
        num_kept = max(0, min(length, self.keep_last - num_new))
        for kv in self.store.slot_kv(slot, slice(None)):
            kv[:, :, :num_kept] = kv[:, :, length - num_kept : length].clone()
        self._first_positions[slot] += length - num_kept
        self.store.lengths[slot] = num_kept

    def begin_chunk(self, slot: int, num_tokens: int) -> int:
        """Makes space for the next prefill chunk, and returns the chunk's length, at most ``num_tokens``."""
        return min(num_tokens, PREFILL_CHUNK)

    def positions_for_append(self, slot: int, num_new: int) -> torch.Tensor:
        """Returns the RoPE positions (num_new,) that the next keys given to :meth:`append` must have."""
        return torch.arange(self.context_len(slot), self.context_len(slot) + num_new, device=self.store.device)

    def append(self, slot: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Appends and commits entries that no forward on this cache has written.
        ``keys`` and ``values`` are (layers, Hkv, n, d), with n at most ``keep_last``."""
        self.make_room(slot, keys.shape[2])
        self.store.write_entries(slot, self.store.lengths[slot], keys, values)
        self.commit(slot, keys.shape[2])

    def commit(self, slot: int, num_entries: int) -> None:
        """Commits the first ``num_entries`` scratch entries."""
        self.store.commit(slot, range(num_entries))

    def truncate(self, slot: int, start: int = 0) -> None:
        """Drops entries from position ``start`` on. If no entry is left, the next entry gets position ``start``."""
        num_kept = max(0, start - self._first_positions[slot])
        if num_kept > self.store.lengths[slot]:
            num_kept = 0  # positions between the last entry and ``start`` are missing
        self.store.truncate(slot, num_kept)
        if not num_kept:
            self._first_positions[slot] = start

    def restorable_length(self, slot: int, length: int) -> int:
        """Returns the largest context length up to ``length`` that :meth:`truncate` can restore."""
        return self.store.restorable_length(slot, length)


class RepositionedKVCache(DraftCache):
    """A draft's KV cache of selected entries at positions 0, 1, 2, ..., with new tokens behind the selected entries.

    Args:
        store: each slot has the gathered entries first, then the entries of new tokens, then scratch entries.
        full_store: keys without RoPE, and values. A new token is only in ``store`` until the next gather.
        scratch: maximum number of scratch entries, as in :class:`DraftCache`.
        retrieval: selects the entries.
        rotate: applies RoPE to keys.
        unrotate: removes RoPE from keys.
        prefill_capacity: number of entries of ``store`` that prefill may use. Half of the space after the sink holds a
            prefill chunk, the other half the tokens just before the chunk.
    """

    def __init__(
        self,
        store: KVStore,
        full_store: KVStore,
        scratch: int,
        retrieval: Retrieval,
        rotate: RotateFunction,
        unrotate: RotateFunction,
        prefill_capacity: int,
    ) -> None:
        super().__init__(store, scratch)
        self.full_store, self.retrieval, self.max_new_entries = full_store, retrieval, retrieval.view.max_new
        self._rotate, self._unrotate = rotate, unrotate
        sink, self._prefill_capacity = retrieval.view.sink, prefill_capacity
        self._chunk_size = max(1, min(PREFILL_CHUNK, (prefill_capacity - sink) // 2))
        prefill_window = max(1, prefill_capacity - sink - self._chunk_size)
        self._prefill_retrieval = Retrieval(View("streaming", 0, sink, prefill_window, shared_by_heads=True))
        self._num_gathered = [0] * store.slots  # number of entries of ``store`` that ``full_store`` has too
        # For each slot, the selection_version of the gathered entries; None: the entries are not from ``retrieval``.
        self._gathered_versions: list[int | None] = [None] * store.slots

    def context_len(self, slot: int) -> int:
        return self.full_store.lengths[slot] + self.store.lengths[slot] - self._num_gathered[slot]

    def next_position(self, slot: int) -> int:
        return self.store.lengths[slot]

    def has_full_context(self, slot: int) -> bool:
        """Returns True if ``store`` has the whole context."""
        return self._num_gathered[slot] == self.full_store.lengths[slot]

    def contiguous_suffix_len(self, slot: int) -> int:
        return min(self.context_len(slot), self.retrieval.view.window)

    def begin_chunk(self, slot: int, num_tokens: int) -> int:
        num_new = min(num_tokens, self._chunk_size)
        is_full = self.store.lengths[slot] + num_new > self._prefill_capacity
        lacks_prefix = self._num_gathered[slot] == 0 < self.full_store.lengths[slot]
        if is_full or lacks_prefix:
            self._gather(slot, self._prefill_retrieval)
            self._gathered_versions[slot] = None
        return num_new

    def make_room(self, slot: int, num_new: int) -> None:
        version = self.retrieval.selection_version(slot)
        fits = self.store.lengths[slot] + num_new <= self.retrieval.view.capacity
        if not fits or not (self.has_full_context(slot) or self._gathered_versions[slot] == version):
            self._gather(slot, self.retrieval)
            self._gathered_versions[slot] = version

    def positions_for_append(self, slot: int, num_new: int) -> torch.Tensor:
        # RoPE at position 0 changes nothing, and the full store has keys without RoPE.
        return torch.zeros(num_new, dtype=torch.long, device=self.store.device)

    def append(self, slot: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        start, end = self.store.lengths[slot], self.store.lengths[slot] + keys.shape[2]
        if start and end <= self.retrieval.view.capacity:  # the new entries fit behind the gathered entries
            positions = torch.arange(start, end, device=self.store.device)
            self.store.write_entries(slot, start, self._rotate(keys, positions), values)
            self.commit(slot, end - start)
            return
        self._flush_new_entries(slot)
        self._drop_gathered_entries(slot)
        self._append_to_full(slot, keys, values)

    def restorable_length(self, slot: int, length: int) -> int:
        return length  # the full store can be truncated to any length

    def truncate(self, slot: int, start: int = 0) -> None:
        full_len = self.full_store.lengths[slot]
        if start >= full_len:
            self.store.truncate(slot, min(self.store.lengths[slot], self._num_gathered[slot] + start - full_len))
            return
        self.full_store.truncate(slot, start)
        self._drop_gathered_entries(slot)

    def _drop_gathered_entries(self, slot: int) -> None:
        """Empties ``store``. The next :meth:`begin_chunk` or :meth:`make_room` gathers entries again."""
        self.store.truncate(slot, 0)
        self._num_gathered[slot], self._gathered_versions[slot] = 0, None

    def _append_to_full(self, slot: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.full_store.write_entries(slot, self.full_store.lengths[slot], keys, values)
        self.full_store.lengths[slot] += keys.shape[2]

    def _flush_new_entries(self, slot: int) -> None:
        """Appends the entries of new tokens to ``full_store``. From then on, these entries count as gathered."""
        start, end = self._num_gathered[slot], self.store.lengths[slot]
        if start < end:
            keys, values = (x[:, slot, :, start:end] for x in (self.store.keys, self.store.values))
            self._append_to_full(slot, self._unrotate(keys, torch.arange(start, end, device=self.store.device)), values)
        self._num_gathered[slot] = end

    def _gather(self, slot: int, retrieval: Retrieval) -> None:
        """Fills ``store`` with the entries that ``retrieval`` selects."""
        self._flush_new_entries(slot)
        indices = to_device(retrieval.kv_indices(slot, self.full_store.lengths[slot]), self.full_store.device)
        keys, values = (x[:, slot].index_select(2, indices) for x in (self.full_store.keys, self.full_store.values))
        positions = torch.arange(len(indices), device=self.full_store.device)
        self.store.write_entries(slot, 0, self._rotate(keys, positions), values)
        self.store.lengths[slot] = self._num_gathered[slot] = len(indices)
