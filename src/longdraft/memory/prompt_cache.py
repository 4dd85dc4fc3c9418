"""The prompt cache keeps a KV store after a run, so that the next run prefills only the tokens that are not cached."""

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
from longdraft.memory.recurrent import RecurrentStates, SlotCheckpoint, thin_out
from longdraft.memory.store import KVStore
from longdraft.memory.token_ids import common_prefix_len, to_array

logger = logging.getLogger("longdraft")

# A slot that loses fewer tokens than this is not saved to the prefix tree: prefilling a few tokens again is cheap.
_MIN_SAVED_TOKENS = 32


class PromptCache:
    """Keeps the KV of past prompts and outputs, with the token ids.

    A run prefills each prompt from the first token that differs from the tokens of the slot. The store grows if a run
    needs more slots or longer slots.

    Args:
        feature_layers: layers whose hidden states are always stored with the KV, for later runs that need them.
        tree_bytes: limit of the prefix tree, which keeps sequences that lose their slot; 0: no tree. The tree stays
            empty for models with windows. Checkpoints of recurrent layers count towards the limit.

    Attributes:
        store: the KV store; None before the first run.
        tokens: the token ids of each slot, as arrays.
        rope_regimes: RoPE regime of each slot's KV (``TargetRunner.rope_regime``). No other regime can use this KV.
        snapshot_damaged: True if the snapshot of a restored cache was damaged, and was not used.
        open_count: number of calls of :meth:`open`. If it changes during a run, another run has taken the cache over.
    """

    def __init__(self, feature_layers: tuple[int, ...] = (), tree_bytes: int = 0) -> None:
        self.feature_layers = tuple(feature_layers)
        self._tree = PrefixTree(tree_bytes)
        self.store: KVStore | None = None
        self.tokens: list[array[int]] = []
        self.rope_regimes: list[str] = []
        self.open_count = 0
        self.snapshot_damaged = False
        self._snapshot_path: Path | None = None
        self._snapshot_fingerprint = ""
        self._target_fingerprint: str | None = None

    def __repr__(self) -> str:
        if self._snapshot_path is not None:
            return f"PromptCache(to be read from {self._snapshot_path})"
        lengths = [f"{len(tokens):,}" for tokens in self.tokens if tokens]
        return f"PromptCache({' + '.join(lengths)} tokens)" if lengths else "PromptCache(empty)"

    def open(
        self,
        new_store: Callable[[int, int], KVStore],
        slots: int,
        capacity: int,
        feature_layers: tuple[int, ...] = (),
        compat_key: object = None,
        target_fingerprint: str | None = None,
    ) -> KVStore:
        """Returns the KV store for a run, with the cached KV.

        Args:
            new_store: makes a store from (slots, capacity).
            slots: number of slots that the run needs.
            capacity: number of KV entries that the run needs in each slot.
            feature_layers: layers whose hidden states the run needs. KV without these hidden states is dropped.
            compat_key: KV with another :attr:`KVStore.compat_key` than this is dropped; None: no KV is dropped.
            target_fingerprint: fingerprint of the target with its adapters. KV of another target is dropped. A snapshot
                that is read now must have this fingerprint. None: the target has not changed.

        Raises:
            MemoryBudgetError: a store of that size does not fit. The cache stays unchanged.
            CheckpointError: the snapshot cannot be read, or belongs to another target.
        """
        if target_fingerprint not in (None, self._target_fingerprint):
            self._target_fingerprint = target_fingerprint
            self.clear()
        old, header = self.store, None if self._snapshot_path is None else snapshot.try_read_header(self._snapshot_path)
        is_incompatible = old is not None and (
            (bool(feature_layers) and old.feature_layers != feature_layers) or compat_key not in (None, old.compat_key)
        )
        if old is None or old.slots < slots or old.capacity < capacity or is_incompatible:
            compatible = None if is_incompatible else old
            capacity = max(capacity, len(header.tokens) if header else 0)
            preferred = max(slots, old.slots if old else 0), max(capacity, compatible.capacity if compatible else 0)
            self._replace_store(new_store, (slots, capacity), preferred, compatible)
        assert self.store is not None
        if self._snapshot_path is not None:
            self._load_snapshot(self._snapshot_path, target_fingerprint, header.rope_regime if header else "")
        self.open_count += 1
        return self.store

    def _replace_store(
        self,
        new_store: Callable[[int, int], KVStore],
        minimum: tuple[int, int],
        preferred: tuple[int, int],
        old: KVStore | None,
    ) -> None:
        """Makes a store of (slots, capacity), and copies the KV of the compatible store ``old``, as far as it fits."""
        try:
            store = new_store(*preferred)
        except MemoryBudgetError:
            if preferred == minimum:
                raise
            store = new_store(*minimum)  # loses the last slots, and the ends of long sequences
        if old is None:
            self.tokens, self.rope_regimes = [], []
        if old is None or old.feature_layers != store.feature_layers:
            self._tree.reclaim()
        if old is not None:
            for slot, length in enumerate(old.lengths[: store.slots]):
                copied_len = old.restorable_length(slot, min(length, store.capacity))
                store.copy_entries(slot, slot, 0, copied_len, old)
                self.tokens[slot] = self.tokens[slot][:copied_len]
        # Adapt the lists to the new number of slots.
        del self.tokens[store.slots :], self.rope_regimes[store.slots :]
        self.tokens += [to_array(()) for _ in range(store.slots - len(self.tokens))]
        self.rope_regimes += [""] * (store.slots - len(self.rope_regimes))
        self.store = store

    def _load_snapshot(self, path: Path, target_fingerprint: str | None, rope_regime: str) -> None:
        """Reads the snapshot of a restored cache into slot 0. A damaged snapshot is not used."""
        assert self.store is not None
        try:
            fingerprint = target_fingerprint or self._snapshot_fingerprint
            self.tokens[0] = to_array(snapshot.load(self.store, 0, fingerprint, path))
            self.rope_regimes[0] = rope_regime
        except (snapshot.DamagedSnapshotError, MemoryBudgetError) as error:
            logger.warning("%s The prompt is prefilled again.", error)
            self.snapshot_damaged = isinstance(error, snapshot.DamagedSnapshotError)
            self.store.truncate(0, 0)
        self._snapshot_path = None

    def clear(self) -> None:
        """Drops the KV of all sequences."""
        self._tree.reclaim()
        if self.store is not None:
            for slot in range(self.store.slots):
                self.store.truncate(slot, 0)
        self.tokens = [to_array(()) for _ in self.tokens]

    def choose_slot(self, slots: Sequence[int], prompt: Sequence[int], rope_regime: str = "") -> int:
        """Returns the slot among the free ``slots`` in which a prompt drops and computes the fewest KV entries."""
        # With n shared tokens: (len(slot) - n) + (len(prompt) - n) entries; the prompt is the same for all slots.
        token_ids = to_array(prompt)
        return max(slots, key=lambda i: 2 * self._reusable_len(i, token_ids, 1, rope_regime) - len(self.tokens[i]))

    def _common_prefix_len(self, slot: int, token_ids: array[int], rope_regime: str) -> int:
        """Returns the number of leading tokens of a sequence whose KV a slot has."""
        return common_prefix_len(self.tokens[slot], token_ids) if self.rope_regimes[slot] == rope_regime else 0

    def reuse_prefix(self, slot: int, prompt: Sequence[int], chunk_size: int = 1, rope_regime: str = "") -> int:
        """Truncates a slot to its common prefix with a prompt, and extends the prefix from another slot or the tree.
        Returns the length of the prefix, a multiple of ``chunk_size``.

        The prompt's last token is never reused, because its logits have to be computed. ``rope_regime`` is the RoPE
        regime of the prompt, see :attr:`rope_regimes`.
        """
        assert self.store is not None
        token_ids = to_array(prompt)[:-1]
        reusable_lens = [self._reusable_len(i, token_ids, chunk_size, rope_regime) for i in range(len(self.tokens))]
        own_len, other_len = reusable_lens[slot], max(reusable_lens)
        self._save_to_tree(slot, own_len)
        self.store.truncate(slot, own_len)
        if other_len > own_len:
            self.store.copy_entries(reusable_lens.index(other_len), slot, own_len, other_len)
        length = other_len
        tree_len = self._prefix_len_in_tree(token_ids, chunk_size, rope_regime)
        if tree_len > length:
            for start, kv in self._tree.read_entries(token_ids, length, tree_len, rope_regime):
                self.store.write_entries(slot, start, kv.keys, kv.values, kv.features)
            for states in self.store.states:
                assert isinstance(states, RecurrentStates)
                states.restore(slot, self._tree.match_checkpoints(token_ids, rope_regime), tree_len)
            self.store.lengths[slot] = tree_len
        length = max(length, tree_len)
        self.tokens[slot], self.rope_regimes[slot] = token_ids[:length], rope_regime
        return length

    def _prefix_len_in_tree(self, token_ids: array[int], chunk_size: int, rope_regime: str) -> int:
        """Returns the number of leading tokens that a sequence can take from the tree, a multiple of ``chunk_size``."""
        assert self.store is not None
        if not self.store.states:
            return self._tree.match_prefix(token_ids, rope_regime) // chunk_size * chunk_size
        lengths = self._tree.match_checkpoints(token_ids, rope_regime)
        return max((length for length in lengths if length % chunk_size == 0), default=0)

    def _save_to_tree(self, slot: int, reused_len: int) -> None:
        """Saves a slot's sequence to the tree, before the slot loses the KV after its first ``reused_len`` tokens."""
        store = self.store
        assert store is not None
        token_ids = self.tokens[slot][: store.lengths[slot]]
        if not self._tree.max_bytes or len(token_ids) - reused_len < _MIN_SAVED_TOKENS:
            return
        checkpoints: dict[int, SlotCheckpoint] = {}
        for states in store.states:
            if not isinstance(states, RecurrentStates):
                return
            checkpoints = {n: x for n, x in states.checkpoints(slot).items() if n <= len(token_ids)}
            token_ids = token_ids[: max(checkpoints, default=0)]
        if checkpoints:  # those of one sequence may take a quarter of the tree
            size = max(checkpoint.nbytes for checkpoint in checkpoints.values())
            checkpoints = thin_out(checkpoints, max(1, self._tree.max_bytes // 4 // size))
        free = memory_info.available_bytes(torch.device("cpu"))
        # Growing slots will need free memory later, so a saved sequence may take at most a quarter of it.
        if free is None or free > 4 * len(token_ids) * store.bytes_per_token:
            read = partial(store.read_entries, slot)
            self._tree.insert(token_ids, read, self.rope_regimes[slot], checkpoints)

    def _reusable_len(self, slot: int, token_ids: array[int], chunk_size: int, rope_regime: str) -> int:
        """Returns the length of the common prefix, shortened until it ends with a chunk and can be restored."""
        assert self.store is not None
        length = self._common_prefix_len(slot, token_ids, rope_regime)
        while (shorter := self.store.restorable_length(slot, length // chunk_size * chunk_size)) != length:
            length = shorter
        return length

    def record_tokens(self, slot: int, tokens: Sequence[int]) -> None:
        """Records the token ids of a slot's committed KV. ``tokens`` without committed KV are ignored."""
        assert self.store is not None
        self.tokens[slot] = to_array(tokens[: self.store.lengths[slot]])

    def save(self, path: Path | str, fingerprint: str, slot: int = 0) -> None:
        """Writes a slot's recorded tokens and KV to a snapshot file, atomically; during a run, only prompt tokens.

        Raises:
            RequestError: no run has used this cache yet.
            CheckpointError: the file cannot be written.
        """
        if self.store is None:
            state = "empty" if self._snapshot_path is None else f"still to be read from {self._snapshot_path}"
            raise RequestError(f"The cache is {state}: decode something with cache=..., then save it.")
        if self.store.states and len(self.tokens[slot]) < self.store.lengths[slot]:
            self.open_count += 1  # the truncation drops states that an unfinished run needs: it loses the cache
            self.store.truncate(slot, length := self.store.restorable_length(slot, len(self.tokens[slot])))
            self.tokens[slot] = self.tokens[slot][:length]
        snapshot.save(self.store, slot, self.tokens[slot], fingerprint, path, self.rope_regimes[slot])

    @classmethod
    def restored(cls, path: Path | str, fingerprint: str, feature_layers: tuple[int, ...] = ()) -> PromptCache:
        """Makes a cache that reads the snapshot at ``path`` into slot 0 when a run opens the cache."""
        cache = cls(feature_layers)
        cache._snapshot_path, cache._snapshot_fingerprint = Path(path), fingerprint
        return cache
