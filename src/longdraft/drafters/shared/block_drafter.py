"""Base of drafters whose draft has a block, and keys and values of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any, ClassVar

import torch

from longdraft.attention.transfer import to_device
from longdraft.drafters.shared.draft_round import BoundDraft, DraftRound
from longdraft.drafters.shared.fused_level import TargetKV
from longdraft.drafters.shared.retrieval import RetrievalDrafter
from longdraft.engine.round_result import RoundResult
from longdraft.engine.sequence import Sequence
from longdraft.memory.store import KVShape, KVStore
from longdraft.model.runner import TargetRunner
from longdraft.trees.tree import NodeLimit, TokenTree
from longdraft.views.draft_cache import SPARE_ENTRIES, DraftCache

# Rows whose keys and values are computed together: bounds the memory that reading a long prompt takes.
CHUNK = 1024


class BlockDrafter(RetrievalDrafter):
    """Drafts trees with a block, level by level.

    Attributes:
        draft: the trained draft.
        bound, cache: the draft on its target, and its own keys and values; from :meth:`bind` on.
    """

    token_shift: ClassVar[int] = 0
    """The distance from a row's position to the token behind it that it embeds. Where there is one, rows join what the
    target says of their positions with it, and nodes their parents' outputs."""
    round_type: ClassVar[type[DraftRound]] = DraftRound
    """The class that drafts the trees of one round."""
    is_capturable: bool = True
    """Forwards may be recorded; they must not choose what they compute by what they read."""
    draft: Any
    cache: DraftCache
    bound: BoundDraft

    def bind(self, runner: TargetRunner, store: KVStore) -> None:
        self.bound = self.draft.bind(runner)
        self.runner, self.store = runner, store
        self.cache = self.make_cache()

    @abstractmethod
    def make_cache(self) -> DraftCache:
        """Its own keys and values, empty."""

    def features(self, slot: int, start: int, end: int) -> torch.Tensor | None:
        """The target's hidden states (T, feature_size) of rows [start, end); None if the draft reads none."""
        features = self.store.features if self.token_shift else None
        return None if features is None else features[slot, start:end]

    def inputs(self, sequence: Sequence, start: int, end: int) -> tuple[torch.Tensor | None, ...]:
        """Embeddings and projected features (T, hidden) of rows, the next of the cache, with cos and sin (T, d)."""
        x = self.bound.embedding(to_device(self.tokens(sequence, start, end), self.runner.device))
        features = self.features(sequence.slot, start, end)
        g = None if features is None else self.bound.block.project_features(features)
        return x, g, *self.bound.rotary(self.cache.append_positions(sequence.slot, end - start))

    def keys_values(self, sequence: Sequence, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (layers, Hkv, T, d) of rows [start, end), the next ones of the cache."""
        k, v = self.bound.block.keys_values(*self.inputs(sequence, start, end))
        return k[None], v[None]

    @torch.inference_mode()
    def observe(self, round_result: RoundResult) -> None:
        """Reads a prompt, keys and values alone; scores chunks when that is due. Emitted tokens enter the cache in the
        next round."""
        if round_result.is_prefill:
            self.cache.truncate(round_result.sequence.slot, 0)
            self.read(round_result.sequence, self.known(round_result.sequence) - 1)
        self.update_retrieval(self.store, round_result)

    @torch.inference_mode()
    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        drafted = self.round_type(self, sequences, self.tree.fit(limit).depth)
        return self.grow(
            sequences, drafted.expand, self.bound.draft_to_target_ids, self.runner.device, limit, drafted.likeliest
        )

    def known(self, sequence: Sequence) -> int:
        """Rows of the text that the draft can feed."""
        return sequence.length - self.token_shift

    def tokens(self, sequence: Sequence, start: int, end: int) -> SequenceOf[int]:
        """The tokens that rows [start, end) embed."""
        first = start + self.token_shift - len(sequence.prompt)
        if first >= 0:
            return sequence.output[first : first + end - start]
        return sequence.tokens[start + self.token_shift : end + self.token_shift]

    def read(self, sequence: Sequence, end: int) -> None:
        """Reads keys and values of the rows before ``end`` that the cache lacks, as far back as it goes."""
        cache, slot = self.cache, sequence.slot
        start = max(cache.context_len(slot), end - self.lookback(end))
        if start >= end:
            return
        if start > cache.context_len(slot):
            cache.truncate(slot, start)
        piece = min(CHUNK, cache.window or CHUNK)
        for a in range(start, end, piece):
            self.prefill_chunk(sequence, a, min(end, a + piece))

    def lookback(self, end: int) -> int:
        """Rows before ``end`` that the cache takes."""
        return self.cache.keep_last or end

    def prefill_chunk(self, sequence: Sequence, start: int, end: int) -> None:
        """Takes a piece of a text into the cache."""
        self.cache.append(sequence.slot, *self.keys_values(sequence, start, end))

    def text(self, slots: SequenceOf[int]) -> TargetKV | None:
        """The target's keys and values that the draft sees; None: none."""
        return None

    def new_cache_store(self, shape: KVShape, rows: int) -> KVStore:
        """Memory for ``rows`` rows of each text; the last one takes a batch's padding."""
        # Zeros: a masked row that was never written must not hold a NaN, which a weight of zero would not silence.
        zeroed = replace(shape, padded=True)
        return KVStore(zeroed, self.store.slots, rows + 1, self.runner.device, buffer_arena=self.runner.buffer_arena)

    def last_rows(self, shape: KVShape, last: int, scratch: int, window: int | None = None) -> DraftCache:
        """A cache of a text's last rows."""
        return DraftCache(self.new_cache_store(shape, last + SPARE_ENTRIES + scratch), scratch, last, window)
