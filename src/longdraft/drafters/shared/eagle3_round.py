"""A round of EAGLE-3 and its kin: the rows that are new, the roots' outputs, then the tree level by level."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import nn

from longdraft.attention.transfer import on_device
from longdraft.drafters.shared.eagle3_block import Eagle3Block
from longdraft.drafters.shared.layers import SelfAttend
from longdraft.drafters.shared.levels import DraftRound, Fed, Inputs, each_row, filled, last_rows
from longdraft.drafters.shared.whole_level import WholeLevel
from longdraft.engine.sequence import Sequence
from longdraft.memory.store import KVStore
from longdraft.model.few_rows import FewRowsModule
from longdraft.model.rotary import Rotary
from longdraft.model.runner import TargetRunner
from longdraft.trees.level import Level, likeliest
from longdraft.views.retrieval import Retrieval
from longdraft.views.window import Window


@dataclass(frozen=True)
class BoundDraft:
    """A draft in its target's dtype and on its device, with its embedding, usually the target's.

    Attributes:
        ids: (draft vocabulary,) target id of each draft id; None if they are the same.
        draft_ids: (vocabulary,) draft id of each target id; -1 if the draft does not know the token.
        whole: computes a level in one kernel call; None without such kernels.
        few_rows: speeds up the block's layers, its head included, on a CPU.
    """

    block: Eagle3Block
    embedding: nn.Module
    rotary: Rotary
    ids: torch.Tensor | None
    draft_ids: torch.Tensor | None
    whole: WholeLevel | None
    few_rows: FewRowsModule


class OwnRows(Protocol):
    """A drafter with keys and values of its own, as its rounds see it.

    Attributes:
        cache: the keys and values. retrieval: chooses those that are seen; None: the last ones are.
        forwards: of the draft so far.
    """

    runner: TargetRunner
    store: KVStore
    cache: Window
    retrieval: Retrieval | None
    forwards: int

    @property
    def deep(self) -> bool:
        """True if rows go through several layers, which see the rows before in each."""

    def inputs(self, slot: int, tokens: SequenceOf[int], start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings x and projected features g (T, hidden) of rows [start, start + T)."""

    def fed(self, sequence: Sequence) -> None:
        """Notes which rows are settled: they and the token after them are committed."""

    def attends(self, fed: Fed) -> list[SelfAttend]:
        """The attention of each layer of a deep draft over fed rows, all of which get an output."""


def last_row(sequence: Sequence) -> int:
    """The row of the sequence's last token, the root. The next row has no hidden states yet."""
    return len(sequence.prompt) + len(sequence.output) - 2


class Eagle3Round(DraftRound):
    """One round of a batch: its sequences' rows go through the layers together."""

    def __init__(self, drafter: OwnRows, bound: BoundDraft, sequences: list[Sequence], depth: int) -> None:
        # What is retrieved is turned to other positions on its way, which torch does.
        self._whole = bound.whole if drafter.retrieval is None else None
        super().__init__(sequences, bound.rotary, depth, drafter.runner.device, self._whole is not None)
        self._drafter, self._bound, self._cache = drafter, bound, drafter.cache
        # The last level, and its nodes' outputs (B', W, hidden), their children's g.
        self._last: tuple[Level, torch.Tensor] | None = None

    def said(self, level: Level, best: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self._drafter.forwards += 1
        bound = self._bound
        queries: slice | torch.Tensor = slice(None)
        recorded = self._recorded_roots(level, best) if level.depth == 0 and self._records_roots else None
        if recorded is not None:
            following, *said = recorded
            self._last = level, following
            return said[0], said[-2 if best else 0], said[-1]
        if level.depth == 0:
            fed, inputs, queries = self.roots(level)
        else:
            fed, tokens, g, cos, sin = self._nodes(level)
        if level.depth and self._whole is None and not self._drafter.deep:
            kind = "eagle3", bound.block, best  # recordings are of its weights
            graphs, forward = self._drafter.runner.graphs, partial(_of_nodes, bound, best)
            out, *said = self.recorded(graphs, kind, fed, self._cache, (tokens, g), forward, (cos, sin))
        else:
            if level.depth:
                rows = len(tokens)
                inputs = Inputs(bound.embedding(tokens), g, each_row(cos, rows), each_row(sin, rows))
            if self._whole is not None:
                out, *said = self._whole(fed, inputs, self._cache, None, best)
            else:
                out = self.outputs(fed, inputs, queries)
                said = [*_said(bound.block, best, out)]
        self._last = level, bound.block.following(out).view(len(level.rows), fed.width, -1)
        return said[0], said[-2 if best else 0], said[-1]

    def outputs(self, fed: Fed, inputs: Inputs, queries: slice | torch.Tensor) -> torch.Tensor:
        """Outputs (Tq, hidden) of some of the rows, computed by torch."""
        block, (x, g, cos, sin) = self._bound.block, inputs
        assert g is not None
        if self._drafter.deep:
            return block.through(x, g, cos, sin, self._drafter.attends(fed))[queries]
        out: torch.Tensor = block(x, g, cos, sin, fed.attend(self._cache), queries)
        return out

    def roots(self, level: Level) -> tuple[Fed, Inputs, torch.Tensor]:
        """The rows that the cache lacks. All get keys and values; only the last of each sequence gets an output."""
        starts, followings = self._lacking(level)
        slots = self._slots(level)
        inputs = [self._drafter.inputs(*each) for each in zip(slots, followings, starts, strict=True)]
        fed, cos, sin, newest = self._enters(level, starts, followings)
        x, g = (torch.cat(each) for each in zip(*inputs, strict=True))
        return fed, Inputs(x, g, cos, sin), newest

    def _lacking(self, level: Level) -> tuple[list[int], list[list[int]]]:
        """For each sequence the first row that the cache lacks, and the tokens that follow it and the rows behind."""
        starts, followings = [], []
        for s in (self.sequences[row] for row in level.rows):
            end = last_row(s) + 1
            start = max(min(self._cache.end(s.slot), end - 1), end - self._cache.window)
            known = start + 1 - len(s.prompt)
            followings.append(s.output[known:] if known >= 0 else s.tokens[start + 1 :])
            starts.append(start)
        return starts, followings

    def _enters(
        self, level: Level, starts: list[int], followings: list[list[int]], rows: int | None = None
    ) -> tuple[Fed, torch.Tensor, torch.Tensor, torch.Tensor]:
        """:meth:`entering` for the rows that the cache lacks, which count as fed from now on."""
        for row in level.rows:
            self._drafter.fed(self.sequences[row])
        ends = [start + len(following) for start, following in zip(starts, followings, strict=True)]
        return self.entering(level, starts, ends, rows)

    @property
    def _records_roots(self) -> bool:
        """True where the first level may be recorded: of one layer that sees the whole window."""
        own = self._drafter
        return self._whole is None and not own.deep and own.retrieval is None and type(self) is Eagle3Round

    def _recorded_roots(self, level: Level, best: int) -> list[torch.Tensor] | None:
        """Outputs as g (B', 1, hidden) and what they say; each sequence's rows are padded to the largest number. None
        if they are not recorded."""
        graphs = self._drafter.runner.graphs
        starts, followings = self._lacking(level)
        most = self.padded_rows(graphs, self._cache, followings)
        if most is None:
            return None
        features = self._drafter.store.features
        assert features is not None
        numbers: list[int] = []
        for slot, start, following in zip(self._slots(level), starts, followings, strict=True):
            rows = filled(list(range(start, start + len(following))), most)
            numbers += [n for token, row in zip(filled(following, most), rows, strict=True) for n in (token, slot, row)]
        fed, cos, sin, lasts = self._enters(level, starts, followings, most)
        tokens, slots, at = on_device(numbers, self._drafter.runner.device).view(-1, 3).unbind(1)
        inputs = tokens, features[slots, at], cos, sin
        kind, forward = ("eagle3 roots", self._bound.block, best), partial(_of_roots, self._bound, best)
        out, *said = self.recorded(graphs, kind, fed, self._cache, inputs, forward, (lasts,))
        return [self._bound.block.following(out).view(len(starts), 1, -1), *said]

    def _nodes(self, level: Level) -> tuple[Fed, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """A level's nodes and their tokens, g = the parent's output (T, hidden), cos and sin (B', 1, d)."""
        fed, cos, sin = self.following(level)
        assert self._last is not None
        above = self._last[0].of(level.rows, self._last[1])
        g = above.gather(1, level.parents[..., None].expand(-1, -1, above.shape[2])).flatten(0, 1)
        return fed, level.tokens.flatten(), g, cos, sin


def _said(block: Eagle3Block, best: int, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Logits of outputs where ``best`` is 0; else log-probabilities and ids of the ``best`` likeliest."""
    logits = block.logits(out)
    return likeliest(logits, best) if best else (logits,)


def _of_roots(
    bound: BoundDraft,
    best: int,
    tokens: torch.Tensor,
    features: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    lasts: torch.Tensor,
    attend: SelfAttend,
) -> tuple[torch.Tensor, ...]:
    """Outputs of each sequence's last row, and what they say."""
    newest = last_rows(len(tokens), lasts)
    out = bound.block(bound.embedding(tokens), bound.block.project(features), cos, sin, attend, newest)
    return out, *_said(bound.block, best, out)


def _of_nodes(
    bound: BoundDraft,
    best: int,
    tokens: torch.Tensor,
    g: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    attend: SelfAttend,
) -> tuple[torch.Tensor, ...]:
    """The draft over the nodes of a level: outputs (rows, hidden), and what :func:`_said` says of them."""
    rows = len(tokens)
    out = bound.block(bound.embedding(tokens), g, each_row(cos, rows), each_row(sin, rows), attend)
    return out, *_said(bound.block, best, out)
