"""Base of drafters whose draft has a block, and keys and values of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any, ClassVar

import torch

from longdraft.attention.transfer import on_device
from longdraft.drafters.shared.retrieval import RetrievingDrafter
from longdraft.drafters.shared.round import BoundDraft, DraftRound
from longdraft.drafters.shared.whole_level import Text
from longdraft.engine.event import Event
from longdraft.engine.sequence import Sequence
from longdraft.memory.store import KVShape, KVStore
from longdraft.model.runner import TargetRunner
from longdraft.trees.tree import NodeLimit, TokenTree
from longdraft.views.draft_cache import SPARE, DraftCache

# Rows whose keys and values are computed together: bounds the memory that reading a long prompt takes.
CHUNK = 1024


class NeuralDrafter(RetrievingDrafter):
    """Drafts trees with a block, level by level.

    Attributes:
        draft: the trained draft.
        bound, cache: the draft on its target, and its own keys and values; from :meth:`bind` on.
    """

    ahead: ClassVar[int] = 0
    """The distance from a row's position to the token behind it that it embeds."""
    rounds: ClassVar[type[DraftRound]] = DraftRound
    """The class that drafts the trees of one round."""
    records: bool = True
    """Forwards may be recorded; they must not choose what they compute by what they read."""
    draft: Any
    cache: DraftCache
    bound: BoundDraft

    def bind(self, runner: TargetRunner, store: KVStore) -> None:
        self.bound = self.draft.bound(runner)
        self.runner, self.store = runner, store
        self.cache = self.make_cache()

    @abstractmethod
    def make_cache(self) -> DraftCache:
        """Its own keys and values, empty."""

    def features(self, slot: int, start: int, end: int) -> torch.Tensor | None:
        """The target's hidden states (T, feature_size) of rows [start, end); None if the draft reads none."""
        features = self.store.features if self.ahead else None
        return None if features is None else features[slot, start:end]

    def inputs(self, sequence: Sequence, start: int, end: int) -> tuple[torch.Tensor | None, ...]:
        """Embeddings and projected features (T, hidden) of rows, the next of the cache, with cos and sin (T, d)."""
        x = self.bound.embedding(on_device(self.tokens(sequence, start, end), self.runner.device))
        features = self.features(sequence.slot, start, end)
        g = None if features is None else self.bound.block.project(features)
        return x, g, *self.bound.rotary(self.cache.places(sequence.slot, end - start))

    def keys_values(self, sequence: Sequence, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (layers, Hkv, T, d) of rows [start, end), the next ones of the cache."""
        k, v = self.bound.block.keys_values(*self.inputs(sequence, start, end))
        return k[None], v[None]

    @torch.inference_mode()
    def observe(self, event: Event) -> None:
        """Reads a prompt, keys and values alone; scores chunks when that is due. Emitted tokens enter the cache in the
        next round."""
        if event.begins:
            self.cache.forget(event.sequence.slot, 0)
            self.read(event.sequence, self.known(event.sequence) - 1)
        self.tell(self.store, event)

    @torch.inference_mode()
    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        drafted = self.rounds(self, sequences, self.tree.fit(limit).depth)
        return self.grow(sequences, drafted.expand, self.bound.ids, self.runner.device, limit, drafted.likeliest)

    def known(self, sequence: Sequence) -> int:
        """Rows of the text that the draft can feed."""
        return sequence.length - self.ahead

    def tokens(self, sequence: Sequence, start: int, end: int) -> SequenceOf[int]:
        """The tokens that rows [start, end) embed."""
        first = start + self.ahead - len(sequence.prompt)
        if first >= 0:
            return sequence.output[first : first + end - start]
        return sequence.tokens[start + self.ahead : end + self.ahead]

    def read(self, sequence: Sequence, end: int) -> None:
        """Reads keys and values of the rows before ``end`` that the cache lacks, as far back as it goes."""
        cache, slot = self.cache, sequence.slot
        start = max(cache.end(slot), end - self.goes_back(end))
        if start >= end:
            return
        if start > cache.end(slot):
            cache.forget(slot, start)
        piece = min(CHUNK, cache.window or CHUNK)
        for a in range(start, end, piece):
            self.read_piece(sequence, a, min(end, a + piece))

    def goes_back(self, end: int) -> int:
        """Rows before ``end`` that the cache takes."""
        return self.cache.last or end

    def read_piece(self, sequence: Sequence, start: int, end: int) -> None:
        """Takes a piece of a text into the cache."""
        self.cache.append(sequence.slot, *self.keys_values(sequence, start, end))

    def text(self, slots: SequenceOf[int]) -> Text | None:
        """The target's keys and values that the draft sees; None: none."""
        return None

    def own_store(self, shape: KVShape, rows: int) -> KVStore:
        """Memory for ``rows`` rows of each text; the last one takes a batch's padding."""
        # Zeros: a masked row that was never written must not hold a NaN, which a weight of zero would not silence.
        zeroed = replace(shape, padded=True)
        return KVStore(zeroed, self.store.slots, rows + 1, self.runner.device, rooms=self.runner.rooms)

    def last_rows(self, shape: KVShape, last: int, scratch: int, window: int | None = None) -> DraftCache:
        """A cache of a text's last rows."""
        return DraftCache(self.own_store(shape, last + SPARE + scratch), scratch, last, window)
