"""What a small language model sees of a text that it drafts for: all of it, or a working cache (SpecExtend, 2.2).

    working cache = sink | retrieved chunks | recent | new tokens

Nothing is deleted: the keys of the whole text are kept, without a position, and the working cache is gathered from
them, at positions 0, 1, 2, .... New tokens are appended to it. When the choice of rows has changed, or its room is
full, the new tokens' rows join the others and it is gathered anew. So the model meets no position beyond those that
it was trained on, and a round costs the same at any length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from longdraft.host.rotation import KeyRotation
from longdraft.host.runner import TargetRunner
from longdraft.kv.store import KVStore

# Tokens of a prompt that are read in one forward.
PIECE = 512
# Tokens that may be appended to a working cache before it is gathered anew, unless a tree is deeper.
FRESH = 64


class TextCache(Protocol):
    """The KV of a small language model, a slot per sequence.

    Attributes:
        store: what forwards run on; what was fed is committed there.
        fresh: tokens that may be fed at once to be drafted from.
    """

    store: KVStore
    fresh: int

    def begin(self, slot: int) -> None:
        """A new text begins in a slot."""

    def reading(self, slot: int, wanted: int) -> int:
        """Makes room for the next piece of a text that is read, and says how many of ``wanted`` tokens it may have."""

    def ready(self, slot: int, count: int) -> None:
        """Makes the store what is to be drafted from, with room for ``count`` tokens more, ``fresh`` at most."""

    def cut(self, slot: int, length: int) -> None:
        """The text's tokens from ``length`` on were taken back."""


class FullCache:
    """All of the text, at its true positions.

    Args:
        capacity: tokens of the longest text.
        shown: tree nodes that the model is shown in a round.

    Raises:
        MemoryBudgetError: it does not fit the memory that is free.
    """

    fresh = FRESH

    def __init__(self, runner: TargetRunner, slots: int, capacity: int, shown: int) -> None:
        # In a batch, short chains of new tokens are padded to the longest.
        self.store = runner.new_store(slots, capacity + max(shown, self.fresh))

    def begin(self, slot: int) -> None:
        self.store.truncate(slot, 0)

    def reading(self, slot: int, wanted: int) -> int:
        return min(wanted, PIECE)

    def ready(self, slot: int, count: int) -> None:
        """There is room for any text."""

    def cut(self, slot: int, length: int) -> None:
        self.store.truncate(slot, length)


class Selection(Protocol):
    """Which rows of a text lie in the working cache: :class:`~longdraft.drafters.retrieval.ChunkRetrieval`, or
    :class:`Streaming`."""

    def rows(self, slot: int, length: int) -> torch.Tensor:
        """(n,) positions in a text of ``length`` rows, sorted, none twice."""

    def version(self, slot: int) -> int:
        """Another number whenever other rows may be chosen, but for the recent ones."""

    def reset(self, slot: int) -> None:
        """Another text begins in a slot."""

    def truncate(self, slot: int, length: int) -> None:
        """A text's rows from ``length`` on were taken back."""


@dataclass(frozen=True)
class Streaming:
    """The first and the last rows, whatever the text (StreamingLLM)."""

    sink: int
    recent: int

    def rows(self, slot: int, length: int) -> torch.Tensor:
        sink = min(self.sink, length)
        return torch.cat([torch.arange(sink), torch.arange(max(sink, length - self.recent), length)])

    def version(self, slot: int) -> int:
        return 0

    def reset(self, slot: int) -> None: ...

    def truncate(self, slot: int, length: int) -> None: ...


@dataclass(frozen=True)
class CompactLayout:
    """Sizes of a working cache, in tokens. All positions in it, and those of a tree behind it, are trained ones.

    Attributes:
        sink, recent: first and last rows of the text that are always there.
        most: rows that a selection chooses at most.
        depth: levels of the deepest tree.
        trained: length of the texts that the model was trained on.

    Raises:
        ValueError: more than the model was trained for.
    """

    sink: int
    recent: int
    most: int
    depth: int
    trained: int

    def __post_init__(self) -> None:
        if self.limit + self.depth > self.trained:
            raise ValueError(
                f"a working cache of {self.most} tokens, {self.fresh} new ones and a tree of {self.depth} levels are "
                f"more than the {self.trained} tokens that the draft was trained for: lower sink, recent, chunks or "
                "the tree's depth"
            )

    @property
    def fresh(self) -> int:
        """Tokens that are appended before the working cache is gathered anew."""
        return fresh_room(self.depth)

    @property
    def limit(self) -> int:
        """Rows of a working cache at most, new tokens included."""
        return self.most + self.fresh

    @property
    def reach(self) -> int:
        """Rows while a text is read: window and piece together."""
        return min(self.trained, max(self.limit, self.sink + self.recent + PIECE))

    @property
    def piece(self) -> int:
        """Tokens of a text that are read in one forward."""
        return max(1, min(PIECE, (self.reach - self.sink) // 2))


def fresh_room(depth: int) -> int:
    """Tokens that a working cache has room for behind what is gathered: those of a round of a tree at least."""
    return max(FRESH, depth + 1)


class CompactCache:
    """A working cache, and behind it all of the text.

    A text is read in pieces behind a sliding window, for which the working cache serves too: the sink, the tokens
    before the piece, the piece. (The paper reads it whole, at true positions; those may lie beyond the trained ones,
    and the cost grows with the square of the length.)

    Args:
        capacity: tokens of the longest text.
        shown: tree nodes that the model is shown in a round.

    Attributes:
        store: rows [0, copied) of a slot are copies, the committed rows behind them new tokens.
        full: keys without a position, and values, of all tokens but the new ones.

    Raises:
        UnsupportedModelError: the model's keys cannot be moved.
        MemoryBudgetError: it does not fit the memory that is free.
    """

    def __init__(
        self, runner: TargetRunner, slots: int, capacity: int, shown: int, selection: Selection, layout: CompactLayout
    ) -> None:
        self.selection, self.layout, self.fresh = selection, layout, layout.fresh
        self._rotation = KeyRotation(runner, layout.reach)
        self.store = runner.new_store(slots, layout.reach + max(shown, layout.fresh), resident=True)
        # Gathered by rows, never attended to: row after row on any device.
        self.full = KVStore(runner.kv_shape, slots, capacity, runner.device)
        self._copied = [0] * slots
        # What the working cache was gathered by; None: by the window of reading.
        self._versions: list[int | None] = [None] * slots

    def length(self, slot: int) -> int:
        """Tokens of the text so far."""
        return self.full.lengths[slot] + self.store.lengths[slot] - self._copied[slot]

    def whole(self, slot: int) -> bool:
        """Whether all of the text lies in the working cache, each token at its true position."""
        return self._copied[slot] == self.full.lengths[slot]

    def begin(self, slot: int) -> None:
        self.selection.reset(slot)
        for store in (self.full, self.store):
            store.truncate(slot, 0)
        self._copied[slot], self._versions[slot] = 0, None

    def reading(self, slot: int, wanted: int) -> int:
        layout = self.layout
        count = min(wanted, layout.piece)
        if self.store.lengths[slot] + count > layout.reach:
            self._flush(slot)
            window = Streaming(layout.sink, layout.reach - layout.sink - layout.piece)
            self._gather(slot, window.rows(slot, self.full.lengths[slot]))
            self._versions[slot] = None
        return count

    def ready(self, slot: int, count: int) -> None:
        room = self.store.lengths[slot] + count <= self.layout.limit
        if room and (self.whole(slot) or self._versions[slot] == self.selection.version(slot)):
            return
        self._flush(slot)
        self._select(slot)

    def cut(self, slot: int, length: int) -> None:
        self.selection.truncate(slot, length)
        kept = self.full.lengths[slot]
        if length >= kept:
            self.store.truncate(slot, self._copied[slot] + length - kept)
            return
        self.full.truncate(slot, length)
        self._select(slot)

    def _select(self, slot: int) -> None:
        """Gathers what the selection chooses of the kept rows; there are no new tokens then."""
        self._gather(slot, self.selection.rows(slot, self.full.lengths[slot]))
        self._versions[slot] = self.selection.version(slot)

    def _flush(self, slot: int) -> None:
        """New tokens' rows join those of the whole text."""
        start, end = self._copied[slot], self.store.lengths[slot]
        if start == end:
            return
        keys, values = (x[:, slot, :, start:end] for x in (self.store.keys, self.store.values))
        places = torch.arange(start, end, device=self.store.device)
        at = self.full.lengths[slot]
        self.full.put_rows(slot, at, self._rotation.unturn(keys, places), values)
        self.full.lengths[slot] = at + end - start
        self._copied[slot] = end

    def _gather(self, slot: int, rows: torch.Tensor) -> None:
        """Fills the working cache with rows of the whole text, at positions 0, 1, 2, ...."""
        rows = rows.to(self.full.device)
        keys, values = (x[:, slot].index_select(2, rows) for x in (self.full.keys, self.full.values))
        places = torch.arange(len(rows), device=self.full.device)
        self.store.put_rows(slot, 0, self._rotation.turn(keys, places), values)
        self.store.lengths[slot] = self._copied[slot] = len(rows)
