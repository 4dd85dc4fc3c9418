"""A round of drafts with keys and values of their own: the rows that are new, then the tree level by level.

Everything that is computed goes through :meth:`DraftRound.step`: by one call of our kernels, by torch, or by a recorded
graph. All sequences feed as many rows: those that lack fewer feed earlier ones once more.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from collections.abc import Sequence as SequenceOf
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from longdraft.attention.block import Block
from longdraft.attention.prefix import PrefixAttend
from longdraft.attention.transfer import on_device
from longdraft.drafters.shared.rows import Placed, Rows, attending, together
from longdraft.drafters.shared.whole_level import Flat, WholeLevel, serves
from longdraft.engine.sequence import Sequence
from longdraft.model.few_rows import quicken
from longdraft.model.gpu.graphs import padded
from longdraft.model.runner import TargetRunner
from longdraft.native.stored import Stored
from longdraft.trees.level import Level, likeliest
from longdraft.trees.masks import Ancestors

if TYPE_CHECKING:
    from longdraft.drafters.shared.neural import NeuralDrafter

# New rows of a text that are fed in a round; more are read before, keys and values alone.
MOST = 64
# Inputs for W rows of each of B sequences: tokens (B, W) as ids, or (B, W, hidden) as embeddings; cos and sin (B, W, d)
# at their positions, W may be 1 for all; and (B, W, size) what EAGLE's drafts join with the tokens.
Inputs = tuple[torch.Tensor, ...]


class BoundDraft:
    """A draft in its target's dtype and on its device, with what it shares of the target.

    Args:
        rotary: positions (T,) -> cos and sin (T, d).
        ids: (draft vocabulary,) target id of each draft id; None if they are the same.
        head: the target's rows that the draft borrows; None: it has a head of its own.

    Attributes:
        whole: computes a level in one kernel call; None without such kernels.
        draft_ids: (vocabulary,) draft id of each target id, -1 for one that the draft does not know; None: the same.
    """

    def __init__(
        self,
        runner: TargetRunner,
        block: Any,
        rotary: Any,
        ids: torch.Tensor | None,
        head: torch.Tensor | Stored | None = None,
    ) -> None:
        self.block, self.rotary, self.ids = block, rotary, None if ids is None else ids.to(runner.device)
        self.embedding: nn.Module = getattr(block, "embed_tokens", runner.parts.embedding)
        self.whole = self.draft_ids = None
        if block.plain and (found := serves(runner, block.shape.head_dim)) is not None:
            self.whole = WholeLevel(found, block, block.lm_head.weight if head is None else head)
        if self.ids is not None:
            self.draft_ids = torch.full((runner.parts.head.shape[0],), -1, device=runner.device, dtype=torch.long)
            self.draft_ids[self.ids] = torch.arange(len(self.ids), device=runner.device)
        quicken(block)

    def flat(self, entering: bool, tokens: torch.Tensor, *others: torch.Tensor) -> Flat:
        """Rows (B * W, ...) of inputs as the block takes them: embeddings, what joins them, cos and sin.

        Args:
            entering: the rows are new tokens, and join what the target says of them.
        """
        batch, width = tokens.shape[:2]
        x = tokens.flatten(0, 1)
        cos, sin, *joined = (t.expand(batch, width, -1).flatten(0, 1) for t in others)
        g = self.block.project(joined[0]) if entering else joined[0] if joined else None
        return x if x.is_floating_point() else self.embedding(x), g, cos, sin


def _forward(
    bound: BoundDraft, entering: bool, cross: Callable[..., torch.Tensor] | None, best: int, count: int, *given: Any
) -> tuple[torch.Tensor, ...]:
    """The block on ``count`` inputs: what its nodes' children join, and what is said of them.

    It depends on what it is given alone: a recording outlives the round.

    Args:
        cross: what the block attends to beside its own keys.
        given: the inputs, further tensors of ``cross``, what attends, and the rows that go on.
    """
    *beside, attends, going = given[count:]
    out = bound.block(*bound.flat(entering, *given[:count]), attends, going, cross and partial(cross, *beside))
    logits = bound.block.logits(out)
    return bound.block.following(out), *(likeliest(logits, best) if best else (logits,))


def _cross(
    prefix_attend: PrefixAttend,
    keys: torch.Tensor,
    values: torch.Tensor,
    block: Block,
    longest: int,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    q: torch.Tensor,
) -> torch.Tensor:
    """Every row attends to the target's keys and values before its sequence's root.

    Args:
        block: of the sequences. slots, lengths: its own, or those of a recorded graph, with ``longest`` rows at most.
    """
    seen, size = block, q.shape[1] // len(slots)
    if lengths is not block.lengths_t:
        nowhere = (-1,) * len(slots)
        seen = Block(nowhere, (longest,) * len(slots), size, None, slots, lengths, captured=True)
    rows = q.unflatten(1, (-1, size)).transpose(0, 1)
    return prefix_attend(rows, keys, values, seen, keys.shape[3] ** -0.5).transpose(0, 1).flatten(1, 2)


class DraftRound:
    """One round of a batch.

    Args:
        depth: levels of the trees at most.
    """

    def __init__(self, drafter: NeuralDrafter, sequences: list[Sequence], depth: int) -> None:
        self.sequences, self._owner, self._depth = sequences, drafter, depth
        self._cache, self._bound = drafter.cache, drafter.bound
        self._prefixes: Block | None = None  # of the last level's sequences
        self._graphs, self._device = drafter.runner.graphs, drafter.runner.device
        self._ancestors = Ancestors()
        # The last level, and its nodes' outputs (B', W, hidden).
        self._last: tuple[Level, torch.Tensor] | None = None
        # The level of the roots; cos and sin (B, depth - 1, d) at the levels behind them.
        self._entered: Level | None = None
        self._ahead: tuple[torch.Tensor, ...] = ()

    def expand(self, level: Level) -> torch.Tensor:
        """Logits (B', W, draft vocabulary) of what follows each node."""
        return self.said(level, 0)[0].view(*level.tokens.shape, -1)

    def likeliest(self, level: Level, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and draft ids (B', W, k) of the likeliest tokens behind each node."""
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
        """The rows that the cache lacks, the roots the last of them. They join what the target says of them, and count
        as read from now on."""
        cache, sequences = self._cache, [self.sequences[row] for row in level.rows]
        ends = [self._owner.known(s) for s in sequences]
        width = self._fit(sequences, ends)
        for s, end in zip(sequences, ends, strict=True):
            self._owner.read(s, end - width)
            cache.ready(s.slot, end - cache.end(s.slot))
            cache.extend(s.slot, end - cache.end(s.slot))
        each = [(s, end - width, end) for s, end in zip(sequences, ends, strict=True)]
        tokens = [token for of_text in each for token in self._owner.tokens(*of_text)]
        places = [cache.position(s.slot) - width + i for s in sequences for i in range(width + self._depth - 1)]
        numbers = on_device([*tokens, *places], self._device)
        cos, sin = (x.unflatten(0, (len(ends), -1)) for x in self._bound.rotary(numbers[len(tokens) :]))
        self._entered, self._ahead = level, (cos[:, width:], sin[:, width:])
        found = [self._owner.features(s.slot, start, end) for s, start, end in each]
        joined = [torch.stack(states)] if (states := [x for x in found if x is not None]) else []
        inputs = numbers[: len(tokens)].view(len(ends), width), cos[:, :width], sin[:, :width], *joined
        return Rows.new(cache, self.slots(level), width), inputs

    def nodes(self, level: Level) -> tuple[Rows, Inputs]:
        """The nodes of a level, which join their parents' outputs: a node's position is its root's + its depth."""
        rows = Rows.nodes(self._cache, self.slots(level), level.depth, self._ancestors.add(level))
        assert self._entered is not None
        cos, sin = (self._entered.of(level.rows, x)[:, level.depth - 1, None] for x in self._ahead)
        if not self._owner.ahead:
            return rows, (level.tokens, cos, sin)
        assert self._last is not None
        above = self._last[0].of(level.rows, self._last[1])
        joined = above.gather(1, level.parents[..., None].expand(-1, -1, above.shape[2]))
        return rows, (level.tokens, cos, sin, joined)

    def _fit(self, sequences: list[Sequence], ends: list[int]) -> int:
        """The number of rows that every sequence feeds."""
        cache = self._cache
        lacking = [end - cache.end(s.slot) for s, end in zip(sequences, ends, strict=True)]
        most = max(1, min(MOST, cache.fresh, *([cache.last] if cache.last else [])))
        width = max(1, min(max(lacking), most))
        if together(cache) and self._owner.records:
            width = min(self._graphs.rows(width) or width, most)
        # Rows that are fed once more lie one behind the other in the cache.
        return max(1, min(width, *(cache.tail(s.slot) + n for s, n in zip(sequences, lacking, strict=True))))

    def slots(self, level: Level) -> tuple[int, ...]:
        return tuple(self.sequences[row].slot for row in level.rows)

    # --- the one step ---

    def _beside(self, rows: Rows) -> tuple[Callable[..., torch.Tensor] | None, tuple[torch.Tensor, ...], Hashable]:
        """The attention beside the block's own keys, further tensors (B, ...) that it takes, and its recordings'
        key: they are of these keys and values."""
        text = self._owner.text(rows.slots)
        if text is None:
            return None, (), ()
        keys, values, lengths = text
        if self._prefixes is None or self._prefixes.slots != rows.slots:
            self._prefixes = Block.make(rows.slots, lengths, rows.going, device=keys.device)
        block, longest = replace(self._prefixes, size=rows.going), self._graphs.bound(max(lengths), keys.shape[2])
        cross = partial(_cross, self._owner.runner.prefix_attend, keys, values, block, longest)
        return cross, (block.slots_t, block.lengths_t), (keys.data_ptr(), values.data_ptr(), longest)

    def step(self, rows: Rows, inputs: Inputs, best: int, entering: bool = False) -> tuple[torch.Tensor, ...]:
        """One forward over some rows: outputs (rows that go on, hidden), and what :meth:`said` returns.

        Args:
            entering: the rows are new tokens, and join what the target says of them.
        """
        entering = entering and len(inputs) > 3
        if self._bound.whole is not None:
            flat, text = self._bound.flat(entering, *inputs), self._owner.text(rows.slots)
            out, *said = self._bound.whole(rows, flat, self._cache, text, best)
            return self._bound.block.following(out), *said
        cross, beside, kind = self._beside(rows)
        forward = partial(_forward, self._bound, entering, cross, best, len(inputs))
        kind = kind, self._bound.block, entering, best
        recordable = self._owner.records and not inputs[0].is_floating_point() and together(self._cache)
        found = self._replayed(rows, inputs, beside, forward, kind) if recordable else None
        if found is not None:
            return found
        return forward(*inputs, *beside, rows.attends(self._cache), rows.outputs(self._device))

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
