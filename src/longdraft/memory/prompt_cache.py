"""A store that outlives a run and knows what its slots hold, so that the next run reads only what is new."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from longdraft.errors import RequestError
from longdraft.memory import snapshot
from longdraft.memory.store import KVStore

# Tokens that are compared at a time, a power of two.
_BLOCK = 4096


class PromptCache:
    """Keeps the KV of past prompts and outputs, and the token ids they belong to.

    A run that starts from it prefills each prompt from the first token that differs from its slot's. It may grow
    by replacing its store with a larger one.

    Args:
        feature_layers: hidden states to keep beside the KV even where a run needs none, for the runs that will.

    Attributes:
        tokens: those of each slot, as arrays: they are compared some twenty times as fast as lists.
        opened: how often. A run that finds another number than its own has lost the cache to another one.
    """

    def __init__(self, feature_layers: tuple[int, ...] = ()) -> None:
        self.feature_layers = tuple(feature_layers)
        self.store: KVStore | None = None
        self.tokens: list[array[int]] = []
        self.opened = 0
        self._pending: Path | None = None
        self._fingerprint = ""

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
        dtype: torch.dtype | None = None,
    ) -> KVStore:
        """The store for a run, with what it holds.

        Args:
            new_store: builds a store from (slots, capacity).
            slots, capacity: how many slots the run needs, and how many rows each.
            feature_layers: hidden states that have to lie beside the KV (``new_store`` makes room for them). What was
                read without them is read again.
            dtype: what ``new_store`` keeps rows as, None: any. What was kept as another is read again.

        Raises:
            MemoryBudgetError: when a store of that size does not fit; the cache keeps what it had.
        """
        old = self.store
        lacking = old is not None and bool(feature_layers) and old.feature_layers != feature_layers
        lacking = lacking or (old is not None and dtype not in (None, old.dtype))
        if old is None or old.slots < slots or old.capacity < capacity or lacking:
            slots = max(slots, old.slots if old else 0)
            store = new_store(slots, max(capacity, snapshot.token_count(self._pending) if self._pending else 0))
            if lacking:
                self.tokens = []
            elif old is not None:
                for slot, n in enumerate(old.lengths):
                    # The finer of the two divisions: neither store need hold more layers than it likes.
                    for layers in max(store.portions, old.portions, key=len):
                        for new, rows in zip(store.stored(slot, layers), old.stored(slot, layers), strict=True):
                            new[:, :, :n] = rows[:, :, :n]
                    if store.features is not None and old.features is not None:
                        store.features[slot, :n] = old.features[slot, :n]
                    store.lengths[slot] = n
            self.tokens += [packed(()) for _ in range(slots - len(self.tokens))]
            self.store = store
        assert self.store is not None
        if self._pending is not None:
            self.tokens[0] = packed(snapshot.load(self.store, 0, self._fingerprint, self._pending))
            self._pending = None
        self.opened += 1
        return self.store

    def choose(self, slots: Sequence[int], prompt: Sequence[int]) -> int:
        """Which of several free slots shares the longest prefix with a prompt; of equals, one that holds the least."""
        text = packed(prompt)
        return max(slots, key=lambda slot: (common_prefix(self.tokens[slot], text), -len(self.tokens[slot])))

    def begin(self, slot: int, prompt: Sequence[int], piece: int = 1) -> int:
        """Leaves in a slot what is already there of a prompt; rows that another slot has more of are copied from it.

        The last prompt token is never reused: its logits have to be computed.

        Args:
            piece: only whole multiples of so many rows are reused.

        Returns:
            How many of the prompt's tokens need not be read.
        """
        assert self.store is not None
        text = packed(prompt)[:-1]
        other = self.choose(range(len(self.tokens)), text)
        own, shared = (common_prefix(self.tokens[s], text) // piece * piece for s in (slot, other))
        self.store.truncate(slot, own)
        if shared > own:
            self.store.copy_rows(other, slot, own, shared)
        self.tokens[slot] = text[: max(own, shared)]
        return max(own, shared)

    def remember(self, slot: int, tokens: Sequence[int]) -> None:
        """Records which tokens the committed rows of a slot belong to.

        Args:
            tokens: at least as many as the slot has committed rows.
        """
        assert self.store is not None
        self.tokens[slot] = packed(tokens[: self.store.lengths[slot]])

    def save(self, path: Path | str, fingerprint: str, slot: int = 0) -> None:
        """Writes a slot to a snapshot file, atomically.

        Raises:
            RequestError: nothing was decoded with this cache yet.
            CheckpointError: the file cannot be written.
        """
        if self.store is None:
            raise RequestError("The cache is empty: decode something with cache=..., then save it.")
        snapshot.save(self.store, slot, self.tokens[slot], fingerprint, path)

    @classmethod
    def restored(cls, path: Path | str, fingerprint: str, feature_layers: tuple[int, ...] = ()) -> PromptCache:
        """A cache that will hold a snapshot in slot 0 once a run has opened it."""
        cache = cls(feature_layers)
        cache._pending, cache._fingerprint = Path(path), fingerprint
        return cache


def packed(tokens: Sequence[int]) -> array[int]:
    """Token ids side by side in memory."""
    return tokens if isinstance(tokens, array) else array("q", tokens)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens two texts share. Two arrays, or two lists, are compared in blocks."""
    if type(a) is not type(b):  # slices of a tuple and of a list are never equal
        a, b = packed(a), packed(b)
    same, shorter, size = 0, min(len(a), len(b)), _BLOCK
    while size:
        # Blocks as long as they agree; then half of one, which finds the place in twelve steps.
        while same + size <= shorter and a[same : same + size] == b[same : same + size]:
            same += size
        size //= 2
    return same
