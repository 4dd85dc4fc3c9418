"""A KV store that outlives a run and knows the tokens of its slots, so that the next run computes only new ones."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from longdraft.errors import MemoryBudgetError, RequestError
from longdraft.memory import memory_info, snapshot
from longdraft.memory.prefix_tree import PrefixTree
from longdraft.memory.store import KVStore
from longdraft.memory.token_ids import common_prefix_len, to_array

logger = logging.getLogger("longdraft")

# Fewer rows are not worth keeping when a slot loses them.
_WORTH = 32


class PromptCache:
    """Keeps the KV of past prompts and outputs with their token ids.

    A run with a cache prefills each prompt from the first token that differs from its slot's. The cache replaces its
    store with a larger one when a run needs it.

    Args:
        feature_layers: layers whose hidden states are kept beside the KV even if a run needs none, for later runs.
        tree_bytes: limit of a tree of the prefixes that lose their slot; 0: none. Texts of models with windows or
            recurrent layers are not kept in it.

    Attributes:
        tokens: the token ids of each slot, as arrays, which compare some twenty times as fast as lists.
        rope_regimes: of the rows of each slot. Texts whose rows are of two kinds share none (``TargetRunner.rope_regime``).
        snapshot_damaged: the snapshot that a restored cache was to read is damaged, and nothing of it is used.
        open_count: number of calls of :meth:`open`. A run that finds it changed has lost the cache to another run.
    """

    def __init__(self, feature_layers: tuple[int, ...] = (), tree_bytes: int = 0) -> None:
        self.feature_layers = tuple(feature_layers)
        self._tree = PrefixTree(tree_bytes)
        self.store: KVStore | None = None
        self.tokens: list[array[int]] = []
        self.rope_regimes: list[str] = []
        self.open_count = 0
        self.snapshot_damaged = False
        self._pending: Path | None = None
        self._fingerprint = ""
        self._computed_by: str | None = None

    def __repr__(self) -> str:
        if self._pending is not None:
            return f"PromptCache(to be read from {self._pending})"
        held = [f"{len(tokens):,}" for tokens in self.tokens if tokens]
        return f"PromptCache({' + '.join(held)} tokens)" if held else "PromptCache(empty)"

    def open(
        self,
        new_store: Callable[[int, int], KVStore],
        slots: int,
        capacity: int,
        feature_layers: tuple[int, ...] = (),
        compat_key: object = None,
        target_fingerprint: str | None = None,
    ) -> KVStore:
        """The store for a run, with the rows that the cache holds.

        Args:
            new_store: builds a store from (slots, capacity).
            slots: number of slots that the run needs.
            capacity: rows of each slot.
            feature_layers: layers whose hidden states the run needs (``new_store`` makes room for them). A cache
                without them is dropped.
            compat_key: :attr:`KVStore.compat_key` of what ``new_store`` makes, or None for any. A cache of another kind is dropped.
            target_fingerprint: the fingerprint of the target, with its adapters. Rows of another target are dropped, and a snapshot
                that is still to be read must be this target's. None if it is the same target as before.

        Raises:
            MemoryBudgetError: a store of that size does not fit; the cache stays as it was.
            CheckpointError: the snapshot cannot be read, or is another target's.
        """
        if target_fingerprint not in (None, self._computed_by):
            self._computed_by = target_fingerprint
            self.clear()
        old, found = self.store, None if self._pending is None else snapshot.try_read_header(self._pending)
        unusable = old is not None and (
            (bool(feature_layers) and old.feature_layers != feature_layers) or compat_key not in (None, old.compat_key)
        )
        if old is None or old.slots < slots or old.capacity < capacity or unusable:
            capacity = max(capacity, len(found.tokens) if found else 0)
            held = old.capacity if old and not unusable else 0
            least, most = (slots, capacity), (max(slots, old.slots if old else 0), max(capacity, held))
            try:
                store = new_store(*most)
            except MemoryBudgetError:
                if most == least:
                    raise
                store = new_store(*least)  # the last slots and the ends of long texts are lost
            if old is not None and (unusable or old.feature_layers != store.feature_layers):
                self._tree.reclaim()
            if unusable:
                self.tokens, self.rope_regimes = [], []
            elif old is not None:
                for slot, length in enumerate(old.lengths[: store.slots]):
                    store.copy_entries(
                        slot, slot, 0, kept := old.restorable_length(slot, min(length, store.capacity)), old
                    )
                    self.tokens[slot] = self.tokens[slot][:kept]
            del self.tokens[store.slots :], self.rope_regimes[store.slots :]
            self.tokens += [to_array(()) for _ in range(store.slots - len(self.tokens))]
            self.rope_regimes += [""] * (store.slots - len(self.rope_regimes))
            self.store = store
        assert self.store is not None
        if self._pending is not None:
            try:
                self.tokens[0] = to_array(
                    snapshot.load(self.store, 0, target_fingerprint or self._fingerprint, self._pending)
                )
                self.rope_regimes[0] = found.rope_regime if found else ""
            except (snapshot.DamagedSnapshotError, MemoryBudgetError) as error:
                logger.warning("%s The prompt is read anew.", error)
                self.snapshot_damaged = isinstance(error, snapshot.DamagedSnapshotError)
                self.store.truncate(0, 0)
            self._pending = None
        self.open_count += 1
        return self.store

    def clear(self) -> None:
        """Drops the rows of all texts."""
        self._tree.reclaim()
        if self.store is not None:
            for slot in range(self.store.slots):
                self.store.truncate(slot, 0)
        self.tokens = [to_array(()) for _ in self.tokens]

    def choose_slot(self, slots: Sequence[int], prompt: Sequence[int], rope_regime: str = "") -> int:
        """The one of several free slots in which a prompt, whose rows are of this kind, changes the fewest rows: those
        of the slot's text that it does not begin with, and those that it has to copy from elsewhere."""
        text = to_array(prompt)
        return max(
            slots, key=lambda slot: 2 * self._common_prefix_len(slot, text, rope_regime) - len(self.tokens[slot])
        )

    def _common_prefix_len(self, slot: int, text: array[int], kind: str) -> int:
        """Leading tokens of a text whose rows a slot has."""
        return common_prefix_len(self.tokens[slot], text) if self.rope_regimes[slot] == kind else 0

    def reuse_prefix(self, slot: int, prompt: Sequence[int], chunk_size: int = 1, rope_regime: str = "") -> int:
        """Truncates a slot to its common prefix with a prompt, and copies more of the prompt from another slot, or from
        the tree, if that has it. The last prompt token is never reused, as its logits have to be computed.

        Args:
            chunk_size: the number of reused entries is a multiple of this.
            rope_regime: the RoPE factors of the prompt's keys; see :attr:`rope_regimes`.

        Returns:
            The number of the prompt's tokens that the slot holds.
        """
        assert self.store is not None
        text = to_array(prompt)[:-1]
        other = max(range(len(self.tokens)), key=lambda each: self._common_prefix_len(each, text, rope_regime))
        held, shared = (self._shared(s, text, chunk_size, rope_regime) for s in (slot, other))
        self._save_to_tree(slot, held)
        self.store.truncate(slot, held)
        if shared > held:
            self.store.copy_entries(other, slot, held, shared)
        kept = max(held, shared)
        known = self._prefix_len_in_tree(text, rope_regime) // chunk_size * chunk_size
        if known > kept:
            for at, rows in self._tree.read_entries(text, kept, known, rope_regime):
                self.store.write_entries(slot, at, rows.keys, rows.values, rows.features)
            self.store.commit(slot, range(known - kept))
        self.tokens[slot], self.rope_regimes[slot] = text[: max(kept, known)], rope_regime
        return max(kept, known)

    def _prefix_len_in_tree(self, text: array[int], kind: str) -> int:
        """Leading tokens of a text whose rows the tree has."""
        assert self.store is not None
        return 0 if self.store.states else self._tree.match_prefix(text, kind)

    def _save_to_tree(self, slot: int, kept_len: int) -> None:
        """Keeps a slot's text in the tree, before its rows behind the first ``kept_len`` are lost."""
        store = self.store
        assert store is not None
        text = self.tokens[slot][: store.lengths[slot]]
        if store.states or not self._tree.max_bytes or len(text) - kept_len < _WORTH:
            return
        free = memory_info.available_bytes(torch.device("cpu"))
        # What is free now may have been promised to slots: rows are kept only where there is plenty.
        if free is None or free > 4 * len(text) * store.shape.bytes_per_token:
            self._tree.insert(text, partial(store.read_entries, slot), self.rope_regimes[slot])

    def _shared(self, slot: int, text: array[int], piece: int, kind: str) -> int:
        """Rows of a slot that a text can begin with: a multiple of ``chunk_size`` that the slot's states can go back to."""
        assert self.store is not None
        rows = self._common_prefix_len(slot, text, kind)
        while (found := self.store.restorable_length(slot, rows // piece * piece)) != rows:
            rows = found
        return rows

    def record_tokens(self, slot: int, tokens: Sequence[int]) -> None:
        """Records the tokens of a slot's committed rows; further ``tokens`` are ignored."""
        assert self.store is not None
        self.tokens[slot] = to_array(tokens[: self.store.lengths[slot]])

    def save(self, path: Path | str, fingerprint: str, slot: int = 0) -> None:
        """Writes a slot to a snapshot file, atomically. Of a run that has not ended, it is what was read of the prompt.

        Raises:
            RequestError: no run has used this cache yet.
            CheckpointError: the file cannot be written.
        """
        if self.store is None:
            held = "empty" if self._pending is None else f"still to be read from {self._pending}"
            raise RequestError(f"The cache is {held}: decode something with cache=..., then save it.")
        if self.store.states and len(self.tokens[slot]) < self.store.lengths[slot]:
            self.open_count += 1  # states are those of all rows: a run that has not ended loses the cache
            self.store.truncate(slot, kept := self.store.restorable_length(slot, len(self.tokens[slot])))
            self.tokens[slot] = self.tokens[slot][:kept]
        snapshot.save(self.store, slot, self.tokens[slot], fingerprint, path, self.rope_regimes[slot])

    @classmethod
    def restored(cls, path: Path | str, fingerprint: str, feature_layers: tuple[int, ...] = ()) -> PromptCache:
        """A cache that reads a snapshot into slot 0 when a run opens it."""
        cache = cls(feature_layers)
        cache._pending, cache._fingerprint = Path(path), fingerprint
        return cache
