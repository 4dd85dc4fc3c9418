"""A round of drafts with keys and values of their own: the rows that are new, then the tree level by level.

Everything that is computed goes through :meth:`DraftRound.step`: by one call of our kernels, by torch, or by a recorded
graph. All sequences feed as many rows: those that lack fewer feed earlier ones once more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from collections.abc import Sequence as SequenceOf
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn

from longdraft.attention.transfer import on_device
from longdraft.drafters.shared.rows import Placed, Rows, attending, together
from longdraft.drafters.shared.whole_level import WholeLevel
from longdraft.engine.sequence import Sequence
from longdraft.model.gpu.graphs import padded
from longdraft.trees.level import Level, Likeliest, likeliest
from longdraft.trees.masks import Ancestors

if TYPE_CHECKING:
    from longdraft.drafters.shared.neural import NeuralDrafter

Owner = TypeVar("Owner", bound="NeuralDrafter")
# A block: embeddings, cos and sin, what joins them, further tensors, what attends, the rows that go on -> the head's
# input (rows, hidden), and what the next level's rows join.
Layer = Callable[..., tuple[torch.Tensor, torch.Tensor]]
# New rows of a text that are fed in a round; more are read before, keys and values alone.
MOST = 64


@dataclass(frozen=True)
class BoundDraft:
    """A draft in its target's dtype and on its device, with what it shares of the target.

    Attributes:
        rotary: positions (T,) -> cos and sin (T, d).
        logits: the block's outputs (T, hidden) -> (T, draft vocabulary).
        ids: (draft vocabulary,) target id of each draft id; None if they are the same.
        draft_ids: (vocabulary,) draft id of each target id, -1 for one that the draft does not know; None: the same.
        whole: computes a level in one kernel call; None without such kernels.
    """

    block: Any
    embedding: nn.Module
    rotary: Any
    logits: Callable[[torch.Tensor], torch.Tensor]
    ids: torch.Tensor | None
    whole: WholeLevel | None
    draft_ids: torch.Tensor | None = None


@dataclass(frozen=True)
class Inputs:
    """A draft's inputs for W rows of each of B sequences.

    Attributes:
        tokens: (B, W) ids, or (B, W, hidden) embeddings.
        cos, sin: (B, W, d) rotary embedding at the rows' positions; W may be 1 for all.
        joined: (B, W, size) what EAGLE's drafts join with the tokens; None for other drafts.
    """

    tokens: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    joined: torch.Tensor | None = None


def flat(bound: BoundDraft, tokens: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
    """Embeddings and other inputs (B, W or 1, ...) of rows, as (B * W, ...)."""
    batch, width = tokens.shape[:2]
    x = tokens.flatten(0, 1)
    return [
        x if x.is_floating_point() else bound.embedding(x),
        *(t.expand(batch, width, -1).flatten(0, 1) for t in others),
    ]


def _forward(bound: BoundDraft, layer: Layer, best: int, count: int, *given: Any) -> tuple[torch.Tensor, ...]:
    """A layer on ``count`` inputs and what else it takes: what its nodes' children join, and what is said of them."""
    out, following = layer(*flat(bound, *given[:count]), *given[count:])
    logits = bound.logits(out)
    return following, *(likeliest(logits, best) if best else (logits,))


class DraftRound(ABC, Generic[Owner]):
    """One round of a batch. A subclass defines what a level's rows join, and the layer.

    Args:
        depth: levels of the trees at most.

    Attributes:
        records: forwards may be recorded; they must not choose what they compute by what they read.
    """

    records = True

    def __init__(self, drafter: Owner, sequences: list[Sequence], depth: int) -> None:
        self.sequences, self._owner, self._depth = sequences, drafter, depth
        self._cache, self._bound = drafter.cache, drafter.bound
        self._graphs, self._device = drafter.runner.graphs, drafter.runner.device
        # On a GPU the likeliest tokens are found within the level's recording.
        self._finds_likeliest = self._bound.whole is not None or self._device.type != "cpu"
        self._ancestors = Ancestors()
        # The last level, and its nodes' outputs (B', W, hidden).
        self._last: tuple[Level, torch.Tensor] | None = None
        # The level of the roots; cos and sin (B, depth - 1, d) at the levels behind them.
        self._entered: Level | None = None
        self._ahead: tuple[torch.Tensor, ...] = ()

    @property
    def likeliest(self) -> Likeliest | None:
        """Finds the likeliest tokens without showing logits; None if it cannot."""
        # Not kept: a round that refers to itself would keep its memory until the garbage is collected.
        return self._likeliest if self._finds_likeliest else None

    def expand(self, level: Level) -> torch.Tensor:
        """Logits (B', W, draft vocabulary) of what follows each node."""
        return self.said(level, 0)[0].view(*level.tokens.shape, -1)

    def _likeliest(self, level: Level, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs, ids = (x.view(*level.tokens.shape, -1) for x in self.said(level, count))
        return log_probs, ids

    def said(self, level: Level, best: int) -> tuple[torch.Tensor, ...]:
        """Logits (B' * W, draft vocabulary) of what follows each node where ``best`` is 0; else log-probabilities and
        draft ids (B' * W, k) of the ``best`` likeliest."""
        self._owner.forwards += 1
        rows, inputs = self.nodes(level) if level.depth else self.roots(level)
        out, *said = self.step(rows, inputs, best, entering=not level.depth)
        self._last = level, out.view(*level.tokens.shape, -1)
        return tuple(said)

    def roots(self, level: Level) -> tuple[Rows, Inputs]:
        """The rows that the cache lacks, the roots the last of them."""
        rows, inputs, _ = self.entering(level)
        return rows, inputs

    def nodes(self, level: Level) -> tuple[Rows, Inputs]:
        """The nodes of a level: a node's position is its root's + its depth."""
        rows = Rows.nodes(self._cache, self.slots(level), level.depth, self._ancestors.add(level))
        assert self._entered is not None
        cos, sin = (self._entered.of(level.rows, x)[:, level.depth - 1, None] for x in self._ahead)
        return rows, Inputs(level.tokens, cos, sin)

    def entering(self, level: Level) -> tuple[Rows, Inputs, list[int]]:
        """:meth:`roots`, and the first row of each sequence. They count as read from now on."""
        cache, sequences = self._cache, [self.sequences[row] for row in level.rows]
        ends = [self._owner.known(s) for s in sequences]
        width = self._fit(sequences, ends)
        for s, end in zip(sequences, ends, strict=True):
            self._owner.read(s, end - width)
            cache.ready(s.slot, end - cache.end(s.slot))
            cache.extend(s.slot, end - cache.end(s.slot))
        starts = [end - width for end in ends]
        each = zip(sequences, starts, ends, strict=True)
        tokens = [token for s, start, end in each for token in self._owner.tokens(s, start, end)]
        places = [cache.position(s.slot) - width + i for s in sequences for i in range(width + self._depth - 1)]
        numbers = on_device([*tokens, *places], self._device)
        cos, sin = (x.unflatten(0, (len(ends), -1)) for x in self._bound.rotary(numbers[len(tokens) :]))
        self._entered, self._ahead = level, (cos[:, width:], sin[:, width:])
        inputs = Inputs(numbers[: len(tokens)].view(len(ends), width), cos[:, :width], sin[:, :width])
        return Rows.new(cache, self.slots(level), width), inputs, starts

    def _fit(self, sequences: list[Sequence], ends: list[int]) -> int:
        """The number of rows that every sequence feeds."""
        cache = self._cache
        lacking = [end - cache.end(s.slot) for s, end in zip(sequences, ends, strict=True)]
        most = max(1, min(MOST, cache.fresh, *([cache.last] if cache.last else [])))
        width = max(1, min(max(lacking), most))
        if together(cache) and self.records:
            width = min(self._graphs.rows(width) or width, most)
        # Rows that are fed once more lie one behind the other in the cache.
        return max(1, min(width, *(cache.tail(s.slot) + n for s, n in zip(sequences, lacking, strict=True))))

    def slots(self, level: Level) -> tuple[int, ...]:
        return tuple(self.sequences[row].slot for row in level.rows)

    # --- the one step ---

    @abstractmethod
    def layer(self, rows: Rows, entering: bool) -> tuple[Layer, tuple[torch.Tensor, ...], Hashable]:
        """The block on some rows in torch, further tensors (B, ...) that it takes, and its recordings' key.

        It depends on what it is given alone: a recording outlives the round.
        """

    def following(self, out: torch.Tensor) -> torch.Tensor:
        """Outputs of our kernels (rows, hidden) -> what the next level's rows join."""
        return out

    def step(self, rows: Rows, inputs: Inputs, best: int, entering: bool = False) -> tuple[torch.Tensor, ...]:
        """One forward over some rows: outputs (rows that go on, hidden), and what :meth:`said` returns.

        Args:
            entering: the rows are new tokens, and join what the target says of them.
        """
        if self._bound.whole is not None:
            joined, entered = inputs.joined, None
            if joined is not None:
                entered = self._bound.block.project(joined.flatten(0, 1)) if entering else joined.flatten(0, 1)
            x, cos, sin = flat(self._bound, inputs.tokens, inputs.cos, inputs.sin)
            text = self._owner.text(rows.slots)
            out, *said = self._bound.whole(rows, (x, entered, cos, sin), self._cache, text, best)
            return self.following(out), *said
        layer, beside, kind = self.layer(rows, entering)
        each = [inputs.tokens, inputs.cos, inputs.sin, *([] if inputs.joined is None else [inputs.joined])]
        forward, kind = partial(_forward, self._bound, layer, best, len(each)), (kind, self._bound.block, best)
        recordable = self.records and not inputs.tokens.is_floating_point() and together(self._cache)
        found = self._replayed(rows, each, beside, forward, kind) if recordable else None
        if found is not None:
            return found
        return forward(*each, *beside, rows.attends(self._cache), rows.outputs(self._device))

    def _replayed(
        self,
        rows: Rows,
        inputs: SequenceOf[torch.Tensor],
        beside: SequenceOf[torch.Tensor],
        forward: Callable[..., tuple[torch.Tensor, ...]],
        kind: Hashable,
    ) -> tuple[torch.Tensor, ...] | None:
        """The forward, replayed from a recorded graph; None if there is none.

        New tokens are as many as a recording takes already; nodes are padded.
        """
        graphs, cache = self._graphs, self._cache
        wide = graphs.rows(rows.width)
        if wide is None or (wide != rows.width and rows.going < rows.width):
            return None
        sequences = len(rows.slots)
        batch = padded(sequences, cache.store.slots)
        bound = graphs.bound(rows.longest, cache.store.capacity)
        going = wide if rows.going == rows.width else rows.going

        def given() -> list[torch.Tensor]:
            more = batch - sequences  # which are like the first sequence
            rest = [torch.cat([x, x[:1].expand(more, *x.shape[1:])]) for x in beside] if more else beside
            return [*inputs, *rest, *Placed.of(cache, rows, wide, batch)]

        memory = copy(cache)  # the same tensors; a recording outlives the cache itself
        memory.store = copy(cache.store)
        memory.store.room = None
        like = Rows((0,) * batch, wide, going, ((0, bound),) * batch)

        def level(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            own, at = given[: -len(Placed._fields)], Placed(*given[-len(Placed._fields) :])
            out = forward(*own, [attending(memory, at, bound)], like.outputs(own[0].device))
            return tuple(x.unflatten(0, (batch, -1)) for x in out)

        key = kind, bound, cache.scratch, rows.going == rows.width
        found = graphs.level(cache.store.room or cache.store, key, (batch, wide), given, level)
        return None if found is None else tuple(x[:, : rows.going].flatten(0, 1) for x in found)
