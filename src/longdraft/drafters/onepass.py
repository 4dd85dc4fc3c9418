"""One pass: all levels of a tree from one forward of EAGLE-3's layer (P-EAGLE, arXiv:2602.01469; DSpark, 2607.05147).

    input 0:       x = embed(root),         g = fc(f_t)         the root, where the target's features are f_t
    input k > 0:   x = embed(root) + m_k,   g = fc(f_t) + s_k   mask token k, with learned vectors m_k and s_k
    logits_k = head(RMSNorm(o_k)) + W_out W_in[parent]          o_k: the layer's output at input k; low-rank bigram

Mask tokens stand for unknown tokens, one for each level after the first; input k attends to inputs 0..k. The bigram
corrects a level's logits by the parent token. The KV cache is a window, so memory does not grow with the context.

P-EAGLE's published drafts have x = embed(mask) and g = fc(s) for all k > 0, and no bigram, so a level's logits do not
depend on other levels' tokens. Shapes: B sequences, W nodes of a level for each sequence, M candidates of a level.
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
from longdraft.engine.sequence import Sequence
from longdraft.model.runner import TargetRunner
from longdraft.native.boundary import CPU_FLOAT32
from longdraft.trees.level import TreeLevel
from longdraft.trees.tree import NodeLimit, TokenTree
from longdraft.trees.tree_config import TreeConfig


@dataclass(frozen=True, kw_only=True)
class OnePassShape(Eagle3Shape):
    """Sizes of the module. ``slots``: levels: one for the root and each mask token. ``rank``: the bigram's."""

    slots: int
    rank: int


class OnePassBlock(Eagle3Block):
    """EAGLE-3's module with mask tokens (``slot_embedding``: m_k, ``slot_state``: s_k) and a bigram (W_in, W_out)."""

    shape: OnePassShape

    def __init__(self, shape: OnePassShape) -> None:
        super().__init__(shape)
        num_masks = shape.slots - 1
        self.slot_embedding = nn.Parameter(torch.zeros(num_masks, shape.hidden_size, dtype=torch.float32))
        self.slot_state = nn.Parameter(torch.zeros(num_masks, shape.hidden_size, dtype=torch.float32))
        self.bigram_in = nn.Embedding(shape.vocabulary, shape.rank)
        self.bigram_out = nn.Embedding(shape.vocabulary, shape.rank)

    def initialize(self, seed: int = 0, std: float = 0.02, head: torch.Tensor | None = None) -> None:
        super().initialize(seed, std, head)
        self.initialize_masks_and_bigram(seed)

    def initialize_masks_and_bigram(self, seed: int = 0) -> None:
        """Sets small random mask tokens, and a bigram whose correction is zero at first."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter, std in ((self.slot_embedding, 0.02), (self.slot_state, 0.02), (self.bigram_in.weight, 0.25)):
                parameter.copy_(torch.empty(parameter.shape, **CPU_FLOAT32).normal_(0.0, std, generator=generator))
            self.bigram_out.weight.zero_()

    def mask_token_inputs(
        self, x: torch.Tensor, g: torch.Tensor, indices: slice, embedding: nn.Module | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns x and g (B, number of mask tokens, hidden) of mask tokens, from the roots' x and g (B, 1, hidden).
        ``indices``: which mask tokens; 0 is the first. ``embedding``: the token embedding, which only P-EAGLE needs."""
        return x + self.slot_embedding[indices], g + self.slot_state[indices]

    def successor_weights(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns W_out (B, levels, rank, M) of candidates' draft ids (B, levels, M)."""
        out: torch.Tensor = self.bigram_out(ids).mT
        return out

    def predecessor_weights(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns W_in (..., rank) of parents' draft ids (...). -1 is a token without a draft id, and gives zeros."""
        weights: torch.Tensor = self.bigram_in(ids.clamp_min(0)) * (ids >= 0)[..., None]
        return weights

    def correction(self, parent_ids: torch.Tensor, successor_weights: torch.Tensor) -> torch.Tensor:
        """Returns what to add to the candidates' logits (B, W, M), given their parents' draft ids (B, W)."""
        return (self.predecessor_weights(parent_ids) @ successor_weights).float()


KIND = "onepass"


class OnePassDraft(Eagle3Draft):
    """A trained one-pass draft."""

    kind, label = KIND, "one-pass"
    shape_type, module_type = OnePassShape, OnePassBlock


NUM_CANDIDATES = 24  # the likeliest tokens before the correction; the others count in the normalization, uncorrected
# Cost of one more level, in forwards of the draft: a mask token in the same forward, and a correction.
LEVEL_COST = 0.1


class LevelTopk(NamedTuple):
    """The M candidates of each level for B sequences, before the correction.

    Attributes:
        logprobs, ids: (B, levels, M) log-probabilities and draft ids.
        rest_logprob: (B, levels, 1) log-probability of all other tokens together.
        correction_inputs: (B, levels, ...) tensor that :meth:`SingleForwardRound.corrected_scores` needs.
    """

    logprobs: torch.Tensor
    ids: torch.Tensor
    rest_logprob: torch.Tensor
    correction_inputs: torch.Tensor


class SingleForwardRound(DraftRound):
    """Base of OnePassRound and DFlashRound: drafts with one forward, and corrects each level by the paths' tokens."""

    def __init__(self, drafter: Eagle3Drafter, sequences: list[Sequence], depth: int) -> None:
        super().__init__(drafter, sequences, depth)
        self._roots: TreeLevel | None = None  # the level of the roots
        self._topk: LevelTopk | None = None  # the forward's result for all levels

    @abstractmethod
    def forward_all_levels(self, level: TreeLevel, k: int) -> tuple[torch.Tensor, ...]:
        """Runs the forward; returns ``logprobs``, ``ids`` and ``correction_inputs`` of a :class:`LevelTopk`.
        ``level``: the roots. ``k``: number of candidates of a level."""

    @abstractmethod
    def corrected_scores(self, level: TreeLevel, topk: LevelTopk) -> torch.Tensor:
        """Returns unnormalized log-probabilities (B, W, M) of the candidates as children of each node of ``level``.
        ``topk``: the candidates of the next level, for the sequences of ``level``."""

    @property
    def num_candidates(self) -> int:
        """Number of candidates of a level."""
        return NUM_CANDIDATES

    def logits_or_topk(self, level: TreeLevel, top_k: int) -> tuple[torch.Tensor, ...]:
        """Returns log-probabilities and draft ids of the ``top_k`` best children; ``top_k`` must not be 0."""
        assert top_k, "a one-pass draft has no logits of all tokens"
        if level.depth == 0:
            self._drafter.forwards += 1
            logprobs, ids, correction_inputs = self.forward_all_levels(level, max(top_k, self.num_candidates))
            # The clamp keeps log1p finite if rounding makes the sum 1.
            rest_logprob = torch.log1p(-logprobs.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))
            if logprobs.shape[-1] == self._bound.block.shape.vocabulary:  # there are no other tokens
                rest_logprob.fill_(float("-inf"))
            self._roots, self._topk = level, LevelTopk(logprobs, ids, rest_logprob, correction_inputs)
        assert self._roots is not None and self._topk is not None
        selected = (self._roots.index_select(level.sequence_indices, x) for x in self._topk)
        topk = LevelTopk(*(x[:, level.depth, None] for x in selected))
        scores = self.corrected_scores(level, topk)
        total = torch.logaddexp(scores.logsumexp(-1, keepdim=True), topk.rest_logprob)
        best = scores.topk(min(top_k, scores.shape[-1]), dim=-1)
        return best.values - total, topk.ids.expand_as(scores).gather(2, best.indices)


class OnePassRound(SingleForwardRound):
    """Drafts the trees of one round with mask tokens."""

    def forward_all_levels(self, level: TreeLevel, k: int) -> tuple[torch.Tensor, ...]:
        """Runs the forward over new and mask tokens. ``_next_rotary``: the mask tokens' cos and sin, of root_inputs."""
        bound, block, num_masks = self._bound, self._bound.block, self._depth - 1
        batch, (tokens, cos, sin, features) = self.root_inputs(level)
        x, g = bound.embedding(tokens), block.project_features(features)
        masks = block.mask_token_inputs(x[:, -1:], g[:, -1:], slice(num_masks), bound.embedding)
        x, g = (torch.cat(parts, 1) for parts in zip((x, g), masks, strict=True))
        cos, sin = (torch.cat(parts, 1) for parts in zip((cos, sin), self._next_rotary, strict=True))
        batch = DraftBatch.from_new_tokens(self._cache, batch.slots, batch.query_len, num_mask_tokens=num_masks)
        _, *topk = self.forward(batch, (x, cos, sin, g), k)
        logprobs, ids = (t.view(len(level.sequence_indices), batch.num_outputs, -1) for t in topk)
        return logprobs, ids, block.successor_weights(ids)

    def corrected_scores(self, level: TreeLevel, topk: LevelTopk) -> torch.Tensor:
        draft_ids = self._bound.target_to_draft_ids
        parent_ids = level.tokens if draft_ids is None else draft_ids[level.tokens]
        return topk.logprobs + self._bound.block.correction(parent_ids, topk.correction_inputs[:, 0])


class OnePassDrafter(Eagle3Drafter):
    """Drafts trees with one forward a round. A tree has at most ``slots`` levels."""

    round_type: ClassVar[type[DraftRound]] = OnePassRound
    draft: OnePassDraft

    def adapt_tree(self, tree: TreeConfig, draft: Eagle3Draft, options: Mapping[str, Any]) -> TreeConfig:
        max_levels: int = draft.shape.slots
        set_by_user = [name for name in ("widths", "depth") if options.get(name) is not None]
        if set_by_user and tree.depth > max_levels:
            raise ValueError(
                f"a tree of {tree.depth} levels is deeper than the {max_levels} tokens that the draft proposes: "
                f"give {set_by_user[0]} of {max_levels} levels at most"
            )
        return tree.limit_depth(max_levels)

    @property
    def scratch_entries(self) -> int:
        return self.draft.shape.slots - 1

    def propose(self, sequences: list[Sequence], limit: NodeLimit | None = None) -> list[TokenTree]:
        # The planner assumes a draft forward for each level, but one forward drafts all levels.
        if limit is not None:
            limit = replace(limit, min_expected_gain=LEVEL_COST * limit.min_expected_gain)
        return super().propose(sequences, limit)


@dataclass(frozen=True, kw_only=True)
class PEagleShape(Eagle3Shape):
    """Sizes of the module, and the id of the mask token. ``slots``: number of levels that one forward predicts."""

    slots: int
    mask_token: int


class PEagleBlock(Eagle3Block):
    """EAGLE-3's module with one mask token. Its parameter names are those of the published checkpoints."""

    shape: PEagleShape

    def __init__(self, shape: PEagleShape) -> None:
        super().__init__(shape)
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, shape.feature_size, dtype=torch.float32))

    def mask_token_inputs(
        self, x: torch.Tensor, g: torch.Tensor, indices: slice, embedding: nn.Module
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the mask tokens' x and g. All are equal, so only their number counts, and ``g`` is not read."""
        expanded_shape = len(x), indices.stop, x.shape[2]
        mask = torch.full((1,), self.shape.mask_token, device=x.device, dtype=torch.long)
        features = self.project_features(self.mask_hidden.view(1, -1))
        return embedding(mask).expand(expanded_shape), features.expand(expanded_shape)

    def successor_weights(self, ids: torch.Tensor) -> torch.Tensor:
        return ids  # any tensor: :meth:`correction` does not read it

    def correction(self, parent_ids: torch.Tensor, successor_weights: torch.Tensor) -> torch.Tensor:
        """Returns zeros (B, W, 1), because a level does not depend on other levels' tokens."""
        return torch.zeros(*parent_ids.shape, 1, dtype=torch.float32, device=parent_ids.device)


class PEagleDraft(Eagle3Draft):
    """A draft in the layout of `speculators`, or in EAGLE-3's published layout."""

    kind, label = PEAGLE, "P-EAGLE"
    shape_type, module_type = PEagleShape, PEagleBlock

    def check(self, runner: TargetRunner) -> None:
        super().check(runner)
        check_mask_token(self.shape, runner.shared_parts.head.shape[0], self.folder)
