"""A small language model that drafts on a part of its own KV, at true positions (MagicDec's small draft with SnapKV).

Its KV of the whole text is kept beside the target's. A round: the tokens emitted since the last one are fed on all of
it, as a verification would, and their rows enter the view; then the tree is drafted on the view. So its KV is never
computed on a part, and a round costs one forward on the whole text, and the others a few hundred rows.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

import torch

from longdraft.drafters.self_drafter import SelfDrafter
from longdraft.drafters.small_lm import check_length
from longdraft.drafters.small_lm_draft import BoundLM, SmallLMDraft
from longdraft.engine.event import Event
from longdraft.engine.sequence import Sequence
from longdraft.memory.prompt_cache import common_prefix
from longdraft.memory.store import KVStore
from longdraft.model.runner import NO_TAPS, Taps, TargetRunner
from longdraft.trees.tree import TokenTree
from longdraft.views.compact import PIECE

# Of tokens that the model does not know.
_NEVER = -1e9


class SparseLMDrafter(SelfDrafter):
    """Drafts with a small language model on a sparse view of its own KV.

    Args:
        draft: the model.
        options: of :class:`SelfDrafter`.

    Raises:
        ValueError: as :class:`SelfDrafter` does.
    """

    def __init__(self, draft: SmallLMDraft, **options: Any) -> None:
        super().__init__(**options)
        self.draft = draft

    query_window = 1  # of the target's

    def rows_read(self, length: int) -> float | None:
        return None

    def query_layers(self, runner: TargetRunner) -> tuple[int, ...]:
        """None of the target's: its own queries choose."""
        return ()

    def bind(self, runner: TargetRunner, store: KVStore) -> None:
        """Hosts the model, and takes memory for its KV and the views.

        Raises:
            CheckpointError: its vocabulary is not the target's, or its weights cannot be read.
            UnsupportedModelError: it cannot be hosted.
            MemoryBudgetError: it does not fit the memory that is free.
        """
        self._bound: BoundLM = self.draft.bound(runner)
        own = self._bound.runner
        # In a batch, short chains of new tokens are padded to the longest.
        self.host(own, own.new_store(store.slots, store.capacity + PIECE))
        self._taps = Taps(queries=tuple(range(own.kv_shape.layers))) if self.view.query_count else NO_TAPS
        self._vocabulary = runner.vocab_size
        # What was fed of each slot's text, token by token.
        self._fed: list[list[int]] = [[] for _ in range(store.slots)]

    @property
    def ids(self) -> torch.Tensor | None:
        return self._bound.ids

    @torch.inference_mode()
    def observe(self, event: Event) -> None:
        """Reads a prompt; of a text that goes on otherwise, keeps what it has in common with what was fed.

        Its own KV was exact before, and its views are chosen by its own queries.

        Raises:
            CapabilityError: the model has no positions for so long a text.
        """
        s = event.sequence
        if event.taken_back:
            self._cut(s.slot, common_prefix(self._fed[s.slot], s.tokens[:-1]))
        if event.begins:
            check_length(self.draft, self._bound, s)
        super().observe(replace(event, queries={}, replaced=None))

    def _open(self, sequence: Sequence) -> None:
        self._read(sequence, sequence.prompt)
        super()._open(sequence)

    @torch.inference_mode()
    def follow(self, sequences: SequenceOf[Sequence]) -> None:
        """Feeds what was emitted since the last round, then brings the views up to it."""
        for s in sequences:
            if len(new := self._new(s)) > PIECE:
                self._read(s, new[:-1])
        going = [s for s in sequences if self._new(s)]
        if going:
            self.forwards += 1
            self._feed(going, [self._new(s) for s in going], self._taps)
        super().follow(sequences)

    def judge(self, sequences: SequenceOf[Sequence], trees: list[TokenTree]) -> list[torch.Tensor]:
        # A draft that overflows judges badly, that is all.
        found = [x.nan_to_num(nan=0.0) for x in super().judge(sequences, trees)]
        if self.ids is None:
            return found
        # Not -inf: where processors leave nothing else, one of these has to be chosen.
        whole = [x.new_full((len(x), self._vocabulary), _NEVER) for x in found]
        for x, logits in zip(whole, found, strict=True):
            x[:, self.ids] = logits
        return whole

    def _begin(self, slot: int) -> None:
        super()._begin(slot)
        self._cut(slot, 0)

    def _cut(self, slot: int, length: int) -> None:
        self.full.truncate(slot, length)
        del self._fed[slot][length:]

    def _new(self, s: Sequence) -> list[int]:
        """Tokens before the root that were not fed."""
        return s.tokens[len(self._fed[s.slot]) : -1]

    def _read(self, s: Sequence, tokens: list[int]) -> None:
        """Feeds a text in pieces, the last of which has all rows whose queries are wanted."""
        while tokens:
            count = len(tokens) if len(tokens) <= PIECE else min(PIECE, len(tokens) - min(self.view.query_count, PIECE))
            piece, tokens = tokens[:count], tokens[count:]
            self._feed([s], [piece], NO_TAPS if tokens else self._taps, prompt=True)

    def _feed(self, sequences: list[Sequence], chains: list[list[int]], taps: Taps, prompt: bool = False) -> None:
        """Feeds tokens of a batch, and keeps the queries that choose."""
        block = self.full.block([s.slot for s in sequences], chains, prompt=prompt)
        out = self.runner.forward(block, self.full, logits="none", taps=taps)
        for b, (s, chain) in enumerate(zip(sequences, chains, strict=True)):
            if out.queries:
                # Of a text's first rows all that choose; later the newest, as of the target's.
                first = 0 if self._queries.of(s.slot) is None else len(chain) - 1
                new = {layer: q[b, :, first : len(chain)] for layer, q in out.queries.items()}
                self._queries.add(s.slot, new)
            self.full.commit(s.slot, range(len(chain)))
            self._fed[s.slot] += chain
