"""The KV of a small language model that drafts: of all of the text, or a working cache (SpecExtend, 2.2).

    working cache = sink | retrieved chunks | window | new tokens

The keys of the whole text are kept, without a position, and the working cache is gathered from them at positions 0, 1,
2, .... New tokens are appended to it. When the choice of rows has changed, or its room is full, the new tokens' rows
join the others and it is gathered anew. So the model meets no position beyond those that it was trained on, and a round
costs the same at any length.
"""

from __future__ import annotations

from typing import Protocol

import torch

from longdraft.errors import UnsupportedModelError
from longdraft.memory.store import KVStore
from longdraft.model.key_rotation import KeyRotation
from longdraft.model.runner import TargetRunner
from longdraft.views.cache import ViewCache
from longdraft.views.refresh import Refresh
from longdraft.views.retrieval import Retrieval
from longdraft.views.view import View

# Tokens of a prompt that are read in one forward.
PIECE = 512
# Tokens that may be appended to a working cache before it is gathered anew; more if a tree is deeper.
FRESH = 64


class TextCache(ViewCache, Protocol):
    """The KV of a small language model, a slot a sequence; tokens that were fed are committed to its store.

    Attributes:
        fresh: tokens that may be fed at once before drafting.
    """

    fresh: int

    def restorable(self, slot: int, length: int) -> int:
        """The largest number of a text's tokens, ``length`` at most, that :meth:`forget` can leave."""

    def reading(self, slot: int, wanted: int) -> int:
        """Makes room for the next piece of a text that is read; returns how many of ``wanted`` tokens it may have."""

    def ready(self, slot: int, count: int) -> None:
        """Prepares the store for drafting, with room for ``count`` more tokens, ``fresh`` at most."""


class FullCache:
    """All of the text, at its true positions.

    Args:
        capacity: tokens of the longest text.
        shown: tree nodes that are fed to the model in a round.

    Raises:
        MemoryBudgetError: it does not fit the free memory.
    """

    fresh = FRESH

    def __init__(self, runner: TargetRunner, slots: int, capacity: int, shown: int) -> None:
        # In a batch, short chains of new tokens are padded to the longest.
        self.store = runner.new_store(slots, capacity + max(shown, self.fresh))

    def whole(self, slot: int) -> bool:
        return True

    def reading(self, slot: int, wanted: int) -> int:
        return min(wanted, PIECE)

    def ready(self, slot: int, count: int) -> None:
        """There is room for any text."""

    def forget(self, slot: int, start: int = 0) -> None:
        self.store.truncate(slot, start)

    def restorable(self, slot: int, length: int) -> int:
        return self.store.restorable(slot, length)


def fresh_room(depth: int) -> int:
    """Tokens that a working cache has room for behind the gathered rows: at least those of a round."""
    return max(FRESH, depth + 1)


class CompactCache:
    """A working cache, and a second store with all of the text.

    A text is read in pieces behind a sliding window, in the working cache too: sink, tokens before the piece, piece.
    With ``whole_prompt`` a prompt is read whole, at true positions, as in the paper; those may lie beyond the trained
    ones, and the cost grows with the square of the length.

    Args:
        capacity: tokens of the longest text.
        shown: tree nodes that are fed to the model in a round.
        retrieval: chooses the rows of the working cache.
        trained: length of the texts that the model was trained on, at least the view's capacity.
        whole_prompt: what the model reads before it first drafts is not cut by a window.

    Attributes:
        store: the working cache: a slot's first rows are copies, the committed rows behind them new tokens.
        full: keys without a position, and values, of all tokens but the new ones.
        reach: rows of the working cache while a text is read.
        piece: tokens that are read in one forward.

    Raises:
        UnsupportedModelError: the model's keys cannot be moved.
        MemoryBudgetError: it does not fit the memory that is free.
    """

    def __init__(
        self,
        runner: TargetRunner,
        slots: int,
        capacity: int,
        shown: int,
        retrieval: Retrieval,
        trained: int,
        whole_prompt: bool = False,
    ) -> None:
        if runner.recurrent:
            raise UnsupportedModelError(
                f"{type(runner.model).__name__} has recurrent layers, whose state is of the whole text: "
                "let it draft on all of its KV (view=full)."
            )
        self.retrieval, view = retrieval, retrieval.view
        self.fresh = view.room
        self.reach = max(view.capacity, view.sink + view.window + PIECE)
        self.reach = max(self.reach, capacity) if whole_prompt else min(trained, self.reach)
        self.piece = max(1, min(PIECE, (self.reach - view.sink) // 2))
        window = View("streaming", 0, view.sink, self.reach - view.sink - self.piece, shared=True)
        self._reading = Retrieval(window, Refresh(0))
        self._rotation = KeyRotation(runner, self.reach)
        self.store = runner.new_store(slots, self.reach + max(shown, self.fresh), resident=True)
        # Rows are gathered from it, and it is never attended to.
        self.full = KVStore(runner.kv_shape, slots, capacity, runner.device)
        self._copied = [0] * slots
        # Version of the choice that the working cache was gathered by; None: it was gathered for reading.
        self._versions: list[int | None] = [None] * slots

    def whole(self, slot: int) -> bool:
        return self._copied[slot] == self.full.lengths[slot]

    def reading(self, slot: int, wanted: int) -> int:
        count = min(wanted, self.piece)
        if self.store.lengths[slot] + count > self.reach:
            self._gather(slot, self._reading)
            self._versions[slot] = None
        return count

    def ready(self, slot: int, count: int) -> None:
        version = self.retrieval.version(slot)
        room = self.store.lengths[slot] + count <= self.retrieval.view.capacity
        if not room or not (self.whole(slot) or self._versions[slot] == version):
            self._gather(slot, self.retrieval)
            self._versions[slot] = version

    def restorable(self, slot: int, length: int) -> int:
        return length

    def forget(self, slot: int, start: int = 0) -> None:
        kept = self.full.lengths[slot]
        if start >= kept:
            self.store.truncate(slot, self._copied[slot] + start - kept)
            return
        self.store.truncate(slot, self._copied[slot])
        self.full.truncate(slot, start)
        self._gather(slot, self.retrieval)
        self._versions[slot] = self.retrieval.version(slot)

    def _gather(self, slot: int, retrieval: Retrieval) -> None:
        """Moves new tokens' rows to the whole text; fills the working cache with chosen rows at positions 0, 1, ...."""
        start, end, kept = self._copied[slot], self.store.lengths[slot], self.full.lengths[slot]
        if start < end:
            keys, values = (x[:, slot, :, start:end] for x in (self.store.keys, self.store.values))
            places = torch.arange(start, end, device=self.store.device)
            self.full.put_rows(slot, kept, self._rotation.unturn(keys, places), values)
            self.full.lengths[slot] = kept + end - start
        rows = retrieval.rows(slot, self.full.lengths[slot]).to(self.full.device)
        keys, values = (x[:, slot].index_select(2, rows) for x in (self.full.keys, self.full.values))
        places = torch.arange(len(rows), device=self.full.device)
        self.store.put_rows(slot, 0, self._rotation.turn(keys, places), values)
        self.store.lengths[slot] = self._copied[slot] = len(rows)
