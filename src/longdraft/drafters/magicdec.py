"""MagicDec: the target or a small language model drafts a chain on a part of its KV (Sadhukhan et al. 2024).

The view's size is fixed, so a draft forward costs the same at any length, and ever less compared with a verification
of a large batch or a long text. With a planner, a chain ends where another token would not be worth its time.

A small language model keeps its KV of the whole text beside the target's. A round feeds it the tokens emitted since
the last one on all of that KV, as a verification would; their rows enter the view, and the chain is drafted on the
view. So its KV is never computed on a part.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Any

import torch

from longdraft.drafters.self_drafter import BUDGET, SelfDrafter, ViewOptions, self_view
from longdraft.drafters.small_lm import SmallLMDrafter, check_length
from longdraft.drafts.language_model import BoundLM, SmallLMDraft
from longdraft.engine.drafter import Drafter
from longdraft.engine.event import Event
from longdraft.engine.method import Method, register
from longdraft.engine.sequence import Sequence
from longdraft.memory.store import KVStore
from longdraft.memory.token_ids import common_prefix
from longdraft.model.outputs import NO_TAPS, Taps
from longdraft.model.runner import TargetRunner
from longdraft.options import option, parse, takes
from longdraft.trees.chain import LONGEST
from longdraft.trees.options import TreeOptions
from longdraft.trees.tree import TokenTree
from longdraft.views.compact import PIECE, fresh_room

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
        """None: rows are chosen by the draft's own queries."""
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
        """Reads a prompt. If tokens were taken back, keeps the part of its KV that still holds.

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
        self._read(sequence, sequence.tokens[:-1])
        super()._open(sequence)

    @torch.inference_mode()
    def follow(self, sequences: SequenceOf[Sequence]) -> None:
        """Feeds the tokens emitted since the last round, then updates the views."""
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
        length = self.full.restorable(slot, length)
        self.full.truncate(slot, length)
        del self._fed[slot][length:]

    def _new(self, s: Sequence) -> list[int]:
        """Tokens before the root that were not fed."""
        return s.tokens[len(self._fed[s.slot]) : -1]

    def _read(self, s: Sequence, tokens: list[int]) -> None:
        """Feeds a text in pieces. The last piece has all rows whose queries are needed."""
        while tokens:
            count = len(tokens) if len(tokens) <= PIECE else min(PIECE, len(tokens) - min(self.view.query_count, PIECE))
            piece, tokens = tokens[:count], tokens[count:]
            self._feed([s], [piece], NO_TAPS if tokens else self._taps, prompt=True)

    def _feed(self, sequences: list[Sequence], chains: list[list[int]], taps: Taps, prompt: bool = False) -> None:
        """Feeds tokens of a batch, and keeps the queries that choose rows."""
        text = max(len(s.tokens) for s in sequences) if prompt else 0
        block = self.full.block([s.slot for s in sequences], chains, prompt=prompt, text=text)
        out = self.runner.forward(block, self.full, logits="none", taps=taps)
        for b, (s, chain) in enumerate(zip(sequences, chains, strict=True)):
            if out.queries:
                # Of a text's first rows all that choose; later the newest, as of the target's.
                first = 0 if self._queries.of(s.slot) is None else len(chain) - 1
                new = {layer: q[b, :, first : len(chain)] for layer, q in out.queries.items()}
                self._queries.add(s.slot, new)
            self.full.commit(s.slot, range(len(chain)))
            self._fed[s.slot] += chain


VIEWS = ("streaming", "snapkv")
_PAPER = "Sadhukhan et al. 2024, MagicDec, arXiv:2408.11049"


@dataclass(frozen=True)
class MagicDecOptions(ViewOptions):
    """The view that a chain is drafted on."""

    view: str = option("snapkv", choices=VIEWS, help="streaming: the first and last rows; snapkv: these and the best")
    depth: int | None = option(
        min=1, help="tokens of the chain (the paper's gamma)", usual="4, planned: as many as pay"
    )


@takes(MagicDecOptions)
def magicdec_self(**options: Any) -> SelfDrafter:
    """The target drafts for itself.

    Raises:
        ValueError: another view, or sizes that make none.
    """
    (own,) = parse("magicdec", options, MagicDecOptions)
    return SelfDrafter(**own.given())


@takes(MagicDecOptions)
def magicdec_small_lm(draft: SmallLMDraft, **options: Any) -> Drafter:
    """A small language model drafts.

    Its streaming view lies at positions that it was trained on (:class:`~longdraft.drafters.small_lm.SmallLMDrafter`),
    SnapKV's at the text's. A streaming view's rows are moved, so they are not rounded: rounding would add up.

    Raises:
        ValueError: another view, sizes that make none, or more than the draft was trained for; ``view_dtype`` with
            view="streaming".
    """
    (own,) = parse("magicdec", options, MagicDecOptions)
    if own.view == "snapkv":
        return SparseLMDrafter(draft, **own.given())
    if own.view_dtype is not None:
        raise ValueError("view_dtype is of view=snapkv where a small language model drafts: leave it out")
    chain = TreeOptions(tree="chain", depth=own.depth).kind("chain")
    chain = replace(chain, chosen_by_user=own.depth is not None)
    longest = max(LONGEST, chain.depth)
    budget = own.budget
    if budget is None and own.window is None:
        budget = min(BUDGET, draft.trained_length - longest - fresh_room(longest))
    sizes = self_view(own.view, budget, own.sink, own.window, own.chunk)
    # Made for the longest chain that a planner may want.
    drafter = SmallLMDrafter(draft, tree="chain", depth=longest, view=own.view, sink=sizes.sink, recent=sizes.window)
    drafter.tree = chain
    return drafter


register(
    Method(
        "magicdec",
        True,
        _PAPER,
        "the model itself or a small language model drafts a chain, on a part of its KV cache; for large batches",
        draft_kind="small-lm",
        drafters=(
            Method("self", True, _PAPER, "", magicdec_self),
            Method("small-lm", True, _PAPER, "", magicdec_small_lm, "small-lm"),
        ),
    )
)
