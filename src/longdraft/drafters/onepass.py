"""One pass: all levels of a tree from one forward of EAGLE-3's layer (P-EAGLE, arXiv:2602.01469; DSpark, 2607.05147).

    row 0:         x = embed(root),         g = fc(f_t)           the row that EAGLE-3 begins with
    row k > 0:     x = embed(root) + m_k,   g = fc(f_t) + s_k     m_k, s_k learned; sees rows 0 .. k - 1
    logits_k = head(RMSNorm(o_k)) + W_out W_in[token before]      a bigram of low rank

Rows k > 0 stand where tokens are not known yet; the bigram corrects each level for the token just before, left to
right, without another forward. Memory is a window: it does not grow with the text.

P-EAGLE's published drafts have x = embed(mask) and g = fc(s) in the rows k > 0, the same behind every anchor, and no
bigram: levels do not know each other's tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from longdraft.drafters.eagle3 import Eagle3Block, Eagle3Draft, Eagle3Drafter
from longdraft.drafters.shared.draft_batch import DraftBatch
from longdraft.drafters.shared.draft_round import DraftRound
from longdraft.drafts.eagle_formats import PEAGLE, Eagle3Shape
from longdraft.drafts.formats import check_mask_token
from longdraft.drafts.kinds import Kind, Training, register
from longdraft.engine.sequence import Sequence
from longdraft.model.runner import TargetRunner
from longdraft.native.boundary import CPU_FLOAT32
from longdraft.trees.kind import TreeConfig
from longdraft.trees.level import TreeLevel
from longdraft.trees.tree import NodeLimit, TokenTree


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

    def initialize(self, seed: int = 0, std: float = 0.02, head: torch.Tensor | None = None) -> None:
        super().initialize(seed, std, head)
        self.initialize_slots(seed)

    def initialize_slots(self, seed: int = 0) -> None:
        """Rows that differ a little, and a bigram that says nothing yet."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter, std in ((self.slot_embedding, 0.02), (self.slot_state, 0.02), (self.bigram_in.weight, 0.25)):
                parameter.copy_(torch.empty(parameter.shape, **CPU_FLOAT32).normal_(0.0, std, generator=generator))
            self.bigram_out.weight.zero_()

    def mask_token_inputs(
        self, x: torch.Tensor, g: torch.Tensor, rows: slice, embedding: nn.Module | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs (B, T, hidden) of some of the rows k > 0, counted from 0, of anchors' x and g (B, 1, hidden)."""
        return x + self.slot_embedding[rows], g + self.slot_state[rows]

    def successor_weights(self, ids: torch.Tensor) -> torch.Tensor:
        """The bigram's output rows (B, depth, rank, M) of draft ids (B, depth, M)."""
        out: torch.Tensor = self.bigram_out(ids).mT
        return out

    def predecessor_weights(self, before: torch.Tensor) -> torch.Tensor:
        """The bigram's input rows (..., rank) of draft ids (...); zeros for -1, an unknown token."""
        found: torch.Tensor = self.bigram_in(before.clamp_min(0)) * (before >= 0)[..., None]
        return found

    def correction(self, previous_ids: torch.Tensor, successor_weights: torch.Tensor) -> torch.Tensor:
        """The numbers added to the scores (B, W, M) of tokens behind draft ids (B, W), given what is beside them."""
        return (self.predecessor_weights(previous_ids) @ successor_weights).float()


KIND = "onepass"


class OnePassDraft(Eagle3Draft):
    """A trained draft."""

    kind, label = KIND, "one-pass"
    shape_type, module_type = OnePassShape, OnePassBlock


# Likely tokens of a row that the bigram chooses among; the rest keep the share of the distribution that they have.
CANDIDATES = 24
# What another level costs, in forwards of the draft.
LEVEL = 0.1


class DepthTopk(NamedTuple):
    """The forward's output for the depths of B sequences, or for one of them: the M likeliest tokens.

    Attributes:
        logprobs, ids: (B, depths, M); draft ids.
        rest: (B, depths, 1) log-probability of all other tokens together.
        beside: (B, depths, ...): what corrects the scores for the token before.
    """

    logprobs: torch.Tensor
    ids: torch.Tensor
    rest: torch.Tensor
    correction_inputs: torch.Tensor


class SingleForwardRound(DraftRound):
    """One round of a batch, in which one forward says the likeliest tokens of every level, and a small correction
    follows the tokens that a node comes after."""

    def __init__(self, drafter: Eagle3Drafter, sequences: list[Sequence], depth: int) -> None:
        super().__init__(drafter, sequences, depth)
        # The level of the sequences, and what was said of each depth.
        self._roots: TreeLevel | None = None
        self._rows: DepthTopk | None = None

    @abstractmethod
    def ask(self, level: TreeLevel, count: int) -> tuple[torch.Tensor, ...]:
        """The forward: ``logprobs``, ``ids`` and ``successor_weights`` of a :class:`DepthTopk`.

        Args:
            level: the roots. count: likeliest tokens of a depth.
        """

    @abstractmethod
    def corrected(self, level: TreeLevel, row: DepthTopk) -> torch.Tensor:
        """Scores (B', W, M) of the likeliest tokens behind each node of a level.

        Args:
            row: of the level's depth, of its sequences.
        """

    @property
    def candidates(self) -> int:
        """Likely tokens of a depth that the correction chooses among."""
        return CANDIDATES

    def said(self, level: TreeLevel, best: int) -> tuple[torch.Tensor, ...]:
        """The likeliest tokens, at most :attr:`candidates`. Trees of this drafter never ask for logits."""
        assert best, "a one-pass draft tells its likeliest tokens alone"
        if level.depth == 0:
            self._owner.forwards += 1
            logprobs, ids, successor_weights = self.ask(level, max(best, self.candidates))
            rest = torch.log1p(-logprobs.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))
            if logprobs.shape[-1] == self._bound.block.shape.vocabulary:
                rest.fill_(float("-inf"))
            self._roots, self._rows = level, DepthTopk(logprobs, ids, rest, successor_weights)
        assert self._roots is not None and self._rows is not None
        row = DepthTopk(
            *(self._roots.index_select(level.sequence_indices, t)[:, level.depth, None] for t in self._rows)
        )
        scores = self.corrected(level, row)
        whole = torch.logaddexp(scores.logsumexp(-1, keepdim=True), row.rest)
        found = scores.topk(min(best, scores.shape[-1]), dim=-1)
        return found.values - whole, row.ids.expand_as(scores).gather(2, found.indices)


class OnePassRound(SingleForwardRound):
    """One round of a batch."""

    def ask(self, level: TreeLevel, count: int) -> tuple[torch.Tensor, ...]:
        """The forward: the rows that the cache lacks, and behind each root those of the tokens further on."""
        bound, block, ahead = self._bound, self._bound.block, self._depth - 1
        rows, (tokens, cos, sin, features) = self.roots(level)
        x, g = bound.embedding(tokens), block.project_features(features)
        further = block.mask_token_inputs(x[:, -1:], g[:, -1:], slice(ahead), bound.embedding)
        x, g = (torch.cat(each, 1) for each in zip((x, g), further, strict=True))
        cos, sin = (torch.cat(each, 1) for each in zip((cos, sin), self._ahead, strict=True))
        rows = DraftBatch.new(self._cache, rows.slots, rows.width, behind=ahead)
        _, *said = self.step(rows, (x, cos, sin, g), count)
        logprobs, ids = (t.view(len(level.sequence_indices), rows.going, -1) for t in said)
        return logprobs, ids, block.successor_weights(ids)

    def corrected(self, level: TreeLevel, row: DepthTopk) -> torch.Tensor:
        table = self._bound.target_to_draft_ids
        before = level.tokens if table is None else table[level.tokens]
        return row.logprobs + self._bound.block.correction(before, row.correction_inputs[:, 0])


class OnePassDrafter(Eagle3Drafter):
    """Drafts trees with one forward a round. A tree has no more levels than the draft has rows."""

    round_type: ClassVar[type[DraftRound]] = OnePassRound
    draft: OnePassDraft

    def adapt_tree(self, tree: TreeConfig, draft: Eagle3Draft, options: Mapping[str, Any]) -> TreeConfig:
        slots: int = draft.shape.slots
        deep = [name for name in ("widths", "depth") if options.get(name) is not None]
        if deep and tree.depth > slots:
            raise ValueError(
                f"a tree of {tree.depth} levels is deeper than the {slots} tokens that the draft proposes: "
                f"give {deep[0]} of {slots} levels at most"
            )
        return tree.limit_depth(slots)

    @property
    def scratch(self) -> int:
        return self.draft.shape.slots - 1

    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        # A planner's price is a forward's, which is taken by then whatever the depth.
        return super().propose(
            sequences, None if limit is None else replace(limit, min_expected_gain=LEVEL * limit.min_expected_gain)
        )


register(
    Kind(
        KIND,
        OnePassDrafter,
        "a trained one-layer draft that proposes all levels of a tree in one forward",
        "P-EAGLE, arXiv:2602.01469; DSpark, arXiv:2607.05147",
        load=OnePassDraft.load,
        training=Training(
            "longdraft.training.config:OnePassConfig",
            "longdraft.training.eagle3:train_onepass",
            "Train a one-pass draft",
        ),
    )
)


@dataclass(frozen=True, kw_only=True)
class PEagleShape(Eagle3Shape):
    """Sizes of the module.

    Attributes:
        slots: tokens that one forward proposes.
        mask_token: the token whose embedding stands for those not known yet.
    """

    slots: int
    mask_token: int


class PEagleBlock(Eagle3Block):
    """The module. Its state dict is the published layout."""

    shape: PEagleShape

    def __init__(self, shape: PEagleShape) -> None:
        super().__init__(shape)
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, shape.feature_size, dtype=torch.float32))

    def mask_token_inputs(
        self, x: torch.Tensor, g: torch.Tensor, rows: slice, embedding: nn.Module
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs (B, T, hidden) of some of the rows k > 0, the same behind every anchor."""
        size, count = x.shape[2], rows.stop
        mask = torch.full((1,), self.shape.mask_token, device=x.device, dtype=torch.long)
        state = self.project_features(self.mask_hidden.view(1, -1))
        return embedding(mask).expand(len(x), count, size), state.expand(len(x), count, size)

    def successor_weights(self, ids: torch.Tensor) -> torch.Tensor:
        return ids

    def correction(self, previous_ids: torch.Tensor, successor_weights: torch.Tensor) -> torch.Tensor:
        """Nothing: levels do not know each other's tokens."""
        return torch.zeros(*previous_ids.shape, 1, dtype=torch.float32, device=previous_ids.device)


class PEagleDraft(Eagle3Draft):
    """A draft as `speculators` writes it, or as EAGLE-3's are published."""

    kind, label = PEAGLE, "P-EAGLE"
    shape_type, module_type = PEagleShape, PEagleBlock

    def check(self, runner: TargetRunner) -> None:
        super().check(runner)
        check_mask_token(self.shape, runner.shared_parts.head.shape[0], self.folder)


register(
    Kind(
        PEAGLE,
        OnePassDrafter,
        "published drafts of P-EAGLE: EAGLE-3's layer, all levels of a tree in one forward",
        "P-EAGLE, arXiv:2602.01469",
        load=PEagleDraft.load,
    )
)
