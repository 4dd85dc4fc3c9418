"""One pass: all levels of a tree from one forward of EAGLE-3's layer (P-EAGLE, arXiv:2602.01469; DSpark, 2607.05147).

    row 0:         x = embed(root),         g = fc(f_t)           the row that EAGLE-3 begins with
    row k > 0:     x = embed(root) + m_k,   g = fc(f_t) + s_k     m_k, s_k learned; sees rows 0 .. k - 1
    logits_k = head(RMSNorm(o_k)) + W_out W_in[token before]      a bigram of low rank

Rows k > 0 stand where tokens are not known yet; the bigram corrects each level for the token just before, left to
right, without another forward. Memory is a window: it does not grow with the text.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from longdraft.drafters.eagle3 import Eagle3Draft, Eagle3Drafter, WindowOptions
from longdraft.drafters.shared.eagle3_block import Eagle3Block
from longdraft.drafters.shared.eagle3_round import BoundDraft, Eagle3Round
from longdraft.drafters.shared.levels import Inputs
from longdraft.drafts.draft_folder import shape_of
from longdraft.drafts.eagle_formats import Eagle3Shape
from longdraft.drafts.kinds import Kind, Training, register
from longdraft.engine.sequence import Sequence
from longdraft.native.boundary import FLOATS
from longdraft.trees.kind import TreeKind
from longdraft.trees.level import Level, likeliest
from longdraft.trees.node_limit import NodeLimit
from longdraft.trees.options import TreeOptions
from longdraft.trees.tree import TokenTree


@dataclass(frozen=True, kw_only=True)
class OnePassShape(Eagle3Shape):
    """Sizes of the module.

    Attributes:
        slots: tokens that one forward proposes, the row of the anchor included.
        rank: of the bigram.
    """

    slots: int
    rank: int


class OnePassBlock(Eagle3Block):
    """The module."""

    shape: OnePassShape

    def __init__(self, shape: OnePassShape) -> None:
        super().__init__(shape)
        ahead = shape.slots - 1
        self.slot_embedding = nn.Parameter(torch.zeros(ahead, shape.hidden_size, dtype=torch.float32))
        self.slot_state = nn.Parameter(torch.zeros(ahead, shape.hidden_size, dtype=torch.float32))
        self.bigram_in = nn.Embedding(shape.vocabulary, shape.rank)
        self.bigram_out = nn.Embedding(shape.vocabulary, shape.rank)

    def initialise(self, seed: int = 0, std: float = 0.02, head: torch.Tensor | None = None) -> None:
        super().initialise(seed, std, head)
        self.initialise_slots(seed)

    def initialise_slots(self, seed: int = 0) -> None:
        """Rows that differ a little, and a bigram that says nothing yet."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter, std in ((self.slot_embedding, 0.02), (self.slot_state, 0.02), (self.bigram_in.weight, 0.25)):
                parameter.copy_(torch.empty(parameter.shape, **FLOATS).normal_(0.0, std, generator=generator))
            self.bigram_out.weight.zero_()

    def behind(self, x: torch.Tensor, g: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs (T, hidden) of some of the rows k > 0, counted from 0, of anchors' x and g (T or 1, hidden)."""
        return x + self.slot_embedding[rows], g + self.slot_state[rows]

    def known(self, before: torch.Tensor) -> torch.Tensor:
        """The bigram's input rows (..., rank) of draft ids (...); zeros for -1, an unknown token."""
        found: torch.Tensor = self.bigram_in(before.clamp_min(0)) * (before >= 0)[..., None]
        return found


KIND = "onepass"


class OnePassDraft(Eagle3Draft):
    """A trained draft."""

    kind, label = KIND, "one-pass"

    @cached_property
    def shape(self) -> OnePassShape:
        return shape_of(OnePassShape, self.config, self.folder, self.label)

    def module(self) -> OnePassBlock:
        return OnePassBlock(self.shape)


# Likely tokens of a row that the bigram chooses among; the rest keep the share of the distribution that they have.
CANDIDATES = 24
# What another level costs, in forwards of the draft.
LEVEL = 0.1


class OnePassDrafter(Eagle3Drafter):
    """Drafts trees with one forward a round.

    Args:
        draft: a trained draft.
        options: of :class:`TreeOptions` and :class:`WindowOptions`. A tree has no more levels than the draft has rows.

    Raises:
        ValueError: for sizes that make no tree; ``widths`` or a ``depth`` of more levels.
    """

    draft: OnePassDraft

    options = (TreeOptions, WindowOptions)

    def shaped(self, tree: TreeKind, draft: Eagle3Draft, options: Mapping[str, Any]) -> TreeKind:
        slots: int = draft.shape.slots  # type: ignore[attr-defined]
        deep = [name for name in ("widths", "depth") if options.get(name) is not None]
        if deep and tree.depth > slots:
            raise ValueError(
                f"a tree of {tree.depth} levels is deeper than the {slots} tokens that the draft proposes: "
                f"give {deep[0]} of {slots} levels at most"
            )
        return tree.limited(slots)

    @property
    def scratch(self) -> int:
        return self.draft.shape.slots - 1

    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        # A planner's price is a forward's, which is taken by then whatever the depth.
        return super().propose(sequences, None if limit is None else replace(limit, price=LEVEL * limit.price))

    def round_of(self, bound: BoundDraft, sequences: list[Sequence], depth: int) -> OneForwardRound:
        return OnePassRound(self, bound, sequences, depth)


class Row(NamedTuple):
    """The forward's output for one depth of B sequences: the M likeliest tokens.

    Attributes:
        log_probs, ids: (B, 1, M); draft ids.
        rest: (B, 1, 1) log-probability of all other tokens together.
        beside: (B, ...) of each sequence: what corrects the scores for the token before.
    """

    log_probs: torch.Tensor
    ids: torch.Tensor
    rest: torch.Tensor
    beside: torch.Tensor


class OneForwardRound(Eagle3Round):
    """One round of a batch, in which one forward says the likeliest tokens of every level, and a small correction
    follows the tokens that a node comes after."""

    def __init__(self, drafter: OnePassDrafter, bound: BoundDraft, sequences: list[Sequence], depth: int) -> None:
        super().__init__(drafter, bound, sequences, depth)
        self._finds_likeliest = True  # without kernels too
        # The level of the sequences, and what was said of each depth.
        self._roots: Level | None = None
        self._rows: list[Row] = []

    @abstractmethod
    def ask(self, level: Level, count: int) -> list[Row]:
        """The forward.

        Args:
            level: the roots. count: likeliest tokens of a depth.
        """

    @abstractmethod
    def corrected(self, level: Level, row: Row) -> torch.Tensor:
        """Scores (B', W, M) of the likeliest tokens behind each node of a level.

        Args:
            row: of the level's depth, of its sequences.
        """

    @property
    def candidates(self) -> int:
        """Likely tokens of a depth that the correction chooses among."""
        return CANDIDATES

    def said(self, level: Level, best: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The likeliest tokens, at most :attr:`candidates`. Trees of this drafter never ask for logits."""
        assert best, "a one-pass draft tells its likeliest tokens alone"
        if level.depth == 0:
            self._drafter.forwards += 1
            self._roots, self._rows = level, self.ask(level, max(best, self.candidates))
        assert self._roots is not None
        row = Row(*(self._roots.of(level.rows, t) for t in self._rows[level.depth]))
        scores = self.corrected(level, row)
        whole = torch.logaddexp(scores.logsumexp(-1, keepdim=True), row.rest)
        found = scores.topk(min(best, scores.shape[-1]), dim=-1)
        log_probs, ids = found.values - whole, row.ids.expand_as(scores).gather(2, found.indices)
        return log_probs[:0], log_probs.flatten(0, 1), ids.flatten(0, 1)


def rest_of(log_probs: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """The log-probability (..., 1) of all tokens but the likeliest, whose log-probabilities (..., M) are given."""
    rest = torch.log1p(-log_probs.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))
    return rest.fill_(float("-inf")) if log_probs.shape[-1] == vocabulary else rest


class OnePassRound(OneForwardRound):
    """One round of a batch."""

    def __init__(self, drafter: OnePassDrafter, bound: BoundDraft, sequences: list[Sequence], depth: int) -> None:
        super().__init__(drafter, bound, sequences, depth)
        self._block: Any = bound.block

    def ask(self, level: Level, count: int) -> list[Row]:
        """The forward: the rows that the cache lacks, and behind each root those of the tokens further on."""
        block, ahead = self._block, self._depth - 1
        fed, inputs, newest = self.roots(level)
        assert inputs.joined is not None
        parts: list[list[torch.Tensor]] = [[], [], [], []]
        own_inputs = (t.split(fed.counts) for t in inputs if t is not None)
        for i, new in enumerate(zip(*own_inputs, strict=True)):
            behind = (*self.behind(new[0][-1:], new[1][-1:], ahead), *(t[i] for t in self._ahead))
            for part, own, more in zip(parts, new, behind, strict=True):
                part += [own, more]
        inputs = Inputs(*map(torch.cat, parts))
        fed = replace(fed, counts=tuple(n + ahead for n in fed.counts), width=1 + ahead, behind=ahead)
        if self._whole is not None:
            _, _, log_probs, ids = self._whole(fed, inputs, self._cache, None, count)
        else:
            # The rows that go on: each root, which now lies further back, and those behind it.
            steps = torch.arange(len(fed.counts), device=newest.device)[:, None] * ahead
            going = newest[:, None] + steps + torch.arange(fed.width, device=newest.device)
            log_probs, ids = likeliest(block.logits(self.outputs(fed, inputs, going.flatten())), count)
        log_probs, ids = (t.view(len(level.rows), fed.width, 1, -1) for t in (log_probs, ids))
        rest, beside = rest_of(log_probs, block.shape.vocabulary), self.beside(ids)
        return [Row(*each) for each in zip(*(t.unbind(1) for t in (log_probs, ids, rest, beside)), strict=True)]

    def behind(self, x: torch.Tensor, g: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs (count, hidden) of the rows behind a root, whose own are x and g (1, hidden)."""
        found: tuple[torch.Tensor, torch.Tensor] = self._block.behind(x, g, slice(count))
        return found

    def beside(self, ids: torch.Tensor) -> torch.Tensor:
        """The bigram's output rows (B, depth, rank, M) of draft ids (B, depth, 1, M)."""
        out: torch.Tensor = self._block.bigram_out(ids[:, :, 0]).mT
        return out

    def corrected(self, level: Level, row: Row) -> torch.Tensor:
        table = self._bound.draft_ids
        known = self._block.known(level.tokens if table is None else table[level.tokens])
        return row.log_probs + (known @ row.beside).float()


register(
    Kind(
        KIND,
        OnePassDraft.load,
        OnePassDrafter,
        "a trained one-layer draft that proposes all levels of a tree in one forward",
        "P-EAGLE, arXiv:2602.01469; DSpark, arXiv:2607.05147",
        Training(
            "longdraft.training.config:OnePassConfig",
            "longdraft.training.onepass:train_onepass",
            "Train a one-pass draft",
        ),
    )
)
