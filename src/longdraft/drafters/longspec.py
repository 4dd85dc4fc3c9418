"""LongSpec: a one-block drafter whose memory does not grow with the context (Yang et al. 2025, section 3).

Its self-attention sees a window of the last tokens, its cross-attention the KV that the target keeps anyway, read
where it lies. A round: the tokens emitted since the last one enter the window, the newest of them, the root, goes
through the whole block; then the tree grows level by level.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from longdraft.attention import dispatch
from longdraft.attention.block import Block
from longdraft.attention.prefix import PrefixAttend
from longdraft.attention.transfer import on_device
from longdraft.drafters.layers import SelfAttend
from longdraft.drafters.levels import DraftRound, Fed, Inputs
from longdraft.drafters.longspec_draft import BoundDraft, LongSpecDraft
from longdraft.drafters.retrieving import RetrievalOptions, RetrievingDrafter
from longdraft.drafters.whole_level import Text
from longdraft.drafts.kinds import Kind, Training, register
from longdraft.engine.event import Event
from longdraft.engine.sequence import Sequence
from longdraft.memory.store import KVStore
from longdraft.model.runner import TargetRunner
from longdraft.options import parse
from longdraft.trees.level import Level
from longdraft.trees.node_limit import NodeLimit
from longdraft.trees.options import TreeOptions
from longdraft.trees.tree import TokenTree
from longdraft.views.retrieved import RetrievedKV
from longdraft.views.window import Window


class LongSpecDrafter(RetrievingDrafter):
    """Drafts trees with a LongSpec block.

    With retrieval, cross-attention sees the chunks of the text that the target attends to, at their true positions
    (SpecExtend, section 2.2); its time then does not grow with the context.

    Args:
        draft: a trained draft.
        options: of :class:`TreeOptions` and :class:`RetrievalOptions`.

    Raises:
        ValueError: for sizes that make no tree, one deeper than the draft's window, or no retrieval.
    """

    options = (TreeOptions, RetrievalOptions)

    def __init__(self, draft: LongSpecDraft, **options: Any) -> None:
        tree, retrieval = parse("LongSpec", options, *self.options)
        self.tree = tree.kind("beam")
        if self.tree.depth >= draft.shape.window:
            raise ValueError(f"{self.tree.depth} levels do not fit the draft's window of {draft.shape.window} tokens")
        self.retrieval = retrieval.made(draft)
        self.draft = draft
        self._bound: BoundDraft | None = None

    def bind(self, runner: TargetRunner, store: KVStore) -> None:
        """Takes the target's parts, and memory for the windows and what is retrieved.

        Raises:
            CheckpointError: the draft was made for another target.
            UnsupportedModelError: the target has nothing that a draft could share.
            MemoryBudgetError: what is retrieved does not fit the memory that is free.
        """
        self._bound = self.draft.bound(runner)
        self._runner, self._store = runner, store
        own = replace(runner.kv_shape, kv_heads=self.draft.shape.kv_heads)
        self.window = Window(own, store.slots, self.draft.shape.window, self.tree.max_expanded, runner.device)
        self.retrieved: RetrievedKV | None = None
        if self.retrieval is not None:
            transposed = dispatch.prefers_transposed_keys(runner.attention_path, store.shape.dtype)
            self.retrieved = RetrievedKV(store, self.retrieval, transposed)

    @torch.inference_mode()
    def observe(self, event: Event) -> None:
        """Reads the window of a new text, or of one that goes on otherwise than it did; scores chunks when it is time.

        Emitted tokens enter the window at the start of the next round.
        """
        s = event.sequence
        self.tell(self._store, event)
        if self.retrieved is not None:
            # The store's rows are read where they lie; what was gathered of them is gathered again.
            if event.replaced is not None:
                self.retrieved.forget(s.slot, event.replaced)
            if event.begins or event.taken_back:
                self.retrieved.forget(s.slot, 0 if event.begins else self._store.readable(s.slot))
        if event.begins:
            self._fill(s.slot, s.prompt)
        if event.taken_back:  # the window holds tokens that were taken back where older ones stood
            self._fill(s.slot, s.tokens[:-1])

    def _fill(self, slot: int, text: list[int]) -> None:
        assert self._bound is not None
        start = max(0, len(text) - self.draft.shape.window)
        tokens = on_device(text[start:], self._runner.device)
        positions = torch.arange(start, len(text), device=self._runner.device)
        k, v = self._bound.block.keys_values(self._bound.parts.embedding(tokens), *self._bound.parts.rotary(positions))
        self.window.append(slot, start, k, v)

    @torch.inference_mode()
    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        assert self._bound is not None
        drafted = _Round(self, self._bound, sequences, self.tree.fit(limit).depth)
        return self.grow(sequences, drafted.expand, self._bound.ids, self._runner.device, limit, drafted.likeliest)

    def text(self, slots: SequenceOf[int]) -> Text:
        """Keys and values of the target's last layer that cross-attention sees, all of the text or a part."""
        if self.retrieved is not None:
            return self.retrieved.read(slots)
        return *self._store.layer(self._store.shape.layers - 1), [self._store.readable(slot) for slot in slots]


class _Round(DraftRound):
    """One round of a batch: its sequences' rows go through the layers together."""

    def __init__(self, drafter: LongSpecDrafter, bound: BoundDraft, sequences: list[Sequence], depth: int) -> None:
        super().__init__(sequences, bound.parts.rotary, depth, drafter._runner.device, bound.whole is not None)
        self._drafter, self._bound, self._window = drafter, bound, drafter.window

    def said(self, level: Level, best: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self._drafter.forwards += 1
        fed, inputs, queries = self._roots(level) if level.depth == 0 else self._nodes(level)
        if self._bound.whole is not None:
            text = self._drafter.text(fed.slots)
            _, *said = self._bound.whole(fed, inputs, self._window, text, best)
            return said[0], said[1], said[2]
        x, _, cos, sin = inputs
        keys, values, lengths = self._drafter.text(fed.slots)
        block = Block.make(fed.slots, lengths, fed.width, device=keys.device)
        forward = partial(_forward, self._bound, self._drafter._runner.prefix_attend, keys, values, block)
        if level.depth and type(self._drafter._store) is KVStore and self._drafter.retrieved is None:
            graphs, kind = self._drafter._runner.graphs, ("longspec", keys.data_ptr(), values.data_ptr())
            beside = block.slots_t, block.lengths_t
            (logits,) = self.recorded(graphs, kind, fed, self._window, (x, cos, sin), forward, beside)
        else:
            (logits,) = forward(x, cos, sin, block.slots_t, block.lengths_t, fed.attend(self._window), queries)
        return logits, logits[:, :0], logits[:, :0]

    def _roots(self, level: Level) -> tuple[Fed, Inputs, torch.Tensor]:
        """The tokens that the window lacks; all of them have keys and values, the roots alone go on."""
        tokens: list[int] = []
        starts, ends = [], []
        for s in (self.sequences[row] for row in level.rows):
            ends.append(len(s.prompt) + len(s.output))
            starts.append(max(self._window.end(s.slot), ends[-1] - self._window.window))
            tokens += s.output[starts[-1] - len(s.prompt) :]
        fed, cos, sin, roots = self.entering(level, starts, ends)
        x = self._bound.parts.embedding(on_device(tokens, level.tokens.device))
        return fed, Inputs(x, None, cos, sin), roots

    def _nodes(self, level: Level) -> tuple[Fed, Inputs, slice]:
        fed, cos, sin = self.following(level)
        return fed, Inputs(self._bound.parts.embedding(level.tokens.flatten()), None, cos, sin), slice(None)


def _forward(
    bound: BoundDraft,
    prefix_attend: PrefixAttend,
    keys: torch.Tensor,
    values: torch.Tensor,
    block: Block,
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    attend: SelfAttend,
    queries: slice | torch.Tensor = slice(None),
) -> tuple[torch.Tensor]:
    """The draft over rows x. Every row sees the same of its sequence's keys and values of the target's last layer: the
    text before the root, as many rows as ``lengths`` says, which are the block's own or those of a recording."""
    if lengths is not block.lengths_t:
        bounds = (keys.shape[2],) * block.batch
        size = x.shape[0] // block.batch
        block = Block((-1,) * block.batch, bounds, size, None, slots, lengths, captured=True)
    scale = keys.shape[3] ** -0.5

    def cross_attend(q: torch.Tensor) -> torch.Tensor:
        rows = q.unflatten(1, (block.batch, block.size)).transpose(0, 1)
        return prefix_attend(rows, keys, values, block, scale).transpose(0, 1).flatten(1, 2)

    return (bound.logits(bound.block(x, cos, sin, attend, cross_attend, queries)),)


register(
    Kind(
        "longspec",
        LongSpecDraft.load,
        LongSpecDrafter,
        "a trained one-block draft that reads the model's own KV cache, at the same cost for any context",
        "Yang et al. 2025, LongSpec, arXiv:2502.17421",
        Training(
            "longdraft.training.config:TrainConfig",
            "longdraft.training.longspec:train_longspec",
            "Train a LongSpec draft",
        ),
        tensors=lambda names: any("cross_attn" in name for name in names),
    )
)
