"""Base of drafters whose draft is a block of a few layers, with a KV cache of its own. (T tokens; head size d.)"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any, ClassVar

import torch

from longdraft.attention.transfer import to_device
from longdraft.drafters.shared import captured_round
from longdraft.drafters.shared.draft_round import BoundDraft, DraftRound
from longdraft.drafters.shared.fused_level import TargetKV
from longdraft.drafters.shared.retrieval import RetrievalDrafter
from longdraft.engine.round_result import RoundResult
from longdraft.engine.sequence import Sequence
from longdraft.engine.verifier import VerifyOutput
from longdraft.memory.store import KVShape, KVStore
from longdraft.model.runner import TargetRunner
from longdraft.trees.level import LevelExpander
from longdraft.trees.tree import NodeLimit, TokenTree
from longdraft.views.draft_cache import SPARE_ENTRIES, DraftCache

# Number of tokens of a prompt whose keys and values are computed together, to bound the memory of a prefill.
KV_CHUNK = 1024


class BlockDrafter(RetrievalDrafter):
    """Drafts trees with a block, level by level.

    The draft's input at position t is token t + ``token_shift``. EAGLE's drafts (``token_shift`` 1) also read a feature
    vector at t: for a token of the context the target's hidden states, for a node of a tree the parent node's output.

    Attributes:
        bound: the draft on its target's device; from :meth:`bind` on.
        cache: the draft's KV cache; from :meth:`bind` on.
    """

    token_shift: ClassVar[int] = 0
    round_type: type[DraftRound] = DraftRound
    """The class that drafts the trees of one round."""
    is_capturable: bool = True
    """True: CUDA graphs may capture forwards. False: the input data decides which operations a forward runs."""
    draft: Any  # the trained draft
    cache: DraftCache
    bound: BoundDraft

    def bind(self, runner: TargetRunner, store: KVStore) -> None:
        self.bound = self.draft.bind(runner)
        self.runner, self.store = runner, store
        self.cache = self.make_cache()
        self.replays_rounds = captured_round.can_capture(self)

    @abstractmethod
    def make_cache(self) -> DraftCache:
        """Makes the draft's empty KV cache."""

    def target_features(self, slot: int, start: int, end: int) -> torch.Tensor | None:
        """Returns the target's hidden states (T, feature_size) at positions [start, end); None if none are read."""
        features = self.store.features if self.token_shift else None
        return None if features is None else features[slot, start:end]

    def block_inputs(self, sequence: Sequence, start: int, end: int) -> tuple[torch.Tensor | None, ...]:
        """Returns embeddings x, features g (T, hidden) or None, cos and sin (T, d) at next positions [start, end)."""
        bound, x = self.bound, None
        if bound.block.reads_tokens:
            x = bound.embedding(to_device(self.input_tokens(sequence, start, end), self.runner.device))
        features = self.target_features(sequence.slot, start, end)
        g = None if features is None else bound.block.project_features(features)
        return x, g, *bound.rotary(self.cache.positions_for_append(sequence.slot, end - start))

    @torch.inference_mode()
    def observe(self, round_result: RoundResult) -> None:
        """Prefills a prompt, and updates the retrieval. Emitted tokens are fed by the next round."""
        if round_result.is_prefill:
            self.cache.truncate(round_result.sequence.slot, 0)
            self.prefill(round_result.sequence, self.num_input_tokens(round_result.sequence) - 1)
        self.update_retrieval(self.store, round_result)

    @torch.inference_mode()
    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        if limit is not None:  # the planner assumes a draft forward for each level
            limit = replace(limit, min_expected_gain=self.round_type.level_cost * limit.min_expected_gain)
        draft_round = self.round_type(self, sequences, self.tree.fit(limit).depth)
        expander = LevelExpander(draft_round.logits_or_topk, self.runner.device, self.bound.draft_to_target_ids)
        return self.grow(sequences, expander, limit)

    def replay_round(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[VerifyOutput] | None:
        return captured_round.replay_round(self, sequences, limit) if self.replays_rounds else None

    def num_input_tokens(self, sequence: Sequence) -> int:
        """Returns the number of positions of a sequence whose input tokens are known."""
        return sequence.length - self.token_shift

    def input_tokens(self, sequence: Sequence, start: int, end: int) -> SequenceOf[int]:
        """Returns the input tokens at positions [start, end)."""
        output_start = start + self.token_shift - len(sequence.prompt)
        if output_start >= 0:
            return sequence.output[output_start : output_start + end - start]
        return sequence.tokens[start + self.token_shift : end + self.token_shift]

    def prefill(self, sequence: Sequence, end: int) -> None:
        """Computes the keys and values that the cache lacks before ``end``, except those that would not fit in it."""
        cache, slot = self.cache, sequence.slot
        start = max(cache.context_len(slot), end - self.lookback(end))
        if start >= end:
            return
        if start > cache.context_len(slot):
            cache.truncate(slot, start)
        chunk_size = min(KV_CHUNK, cache.window or KV_CHUNK)
        for chunk_start in range(start, end, chunk_size):
            self.prefill_chunk(sequence, chunk_start, min(end, chunk_start + chunk_size))

    def lookback(self, end: int) -> int:
        """Returns how many tokens before ``end`` a prefill computes: as many as the cache can hold."""
        return self.cache.keep_last or end

    def prefill_chunk(self, sequence: Sequence, start: int, end: int) -> None:
        """Computes keys and values of a chunk of the context, and writes them to the cache."""
        keys, values = self.bound.block.keys_values(*self.block_inputs(sequence, start, end))
        self.cache.append(sequence.slot, keys, values)

    def target_kv(self, slots: SequenceOf[int]) -> TargetKV | None:
        """Returns the target's keys and values for cross-attention; None if the block has no cross-attention."""
        return None

    def new_cache_store(self, shape: KVShape, num_entries: int) -> KVStore:
        """Makes a store with ``num_entries`` entries for each slot, and one more for the padding of CUDA graphs."""
        # Padded stores start as zeros, because a NaN in a masked entry stays a NaN when multiplied by a weight of 0.
        padded = replace(shape, padded=True)
        slots, arena = self.store.slots, self.runner.buffer_arena
        return KVStore(padded, slots, num_entries + 1, self.runner.device, buffer_arena=arena)

    def window_cache(self, shape: KVShape, keep_last: int, scratch: int, window: int | None = None) -> DraftCache:
        """Makes a cache of the last ``keep_last`` entries of each sequence. For the arguments: :class:`DraftCache`."""
        return DraftCache(self.new_cache_store(shape, keep_last + SPARE_ENTRIES + scratch), scratch, keep_last, window)
