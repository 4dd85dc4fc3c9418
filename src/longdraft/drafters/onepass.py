"""One pass: all levels of a tree from one forward of EAGLE-3's layer (P-EAGLE, arXiv:2602.01469; DSpark, 2607.05147).

    input 0:       x = embed(root),         g = fc(f_t)         the root, where the target's features are f_t
    input k > 0:   x = embed(root) + m_k,   g = fc(f_t) + s_k   mask token k, with learned vectors m_k and s_k
    logits_k = head(RMSNorm(o_k)) + W_out W_in[parent]          o_k: the layer's output at input k; low-rank bigram

Mask tokens stand for unknown tokens, one for each level after the first; input k attends to inputs 0..k. The bigram
corrects a level's logits by the parent token. The KV cache is a window, so memory does not grow with the context.
Shapes: B sequences, W nodes of a level for each sequence, M candidates of a level.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from longdraft.drafters.eagle3 import Eagle3Block, Eagle3Draft
from longdraft.drafters.shared.single_forward import LevelTopk, MaskTokenRound
from longdraft.drafts.eagle_formats import Eagle3Shape
from longdraft.native.boundary import CPU_FLOAT32
from longdraft.trees.level import TreeLevel

KIND = "onepass"


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


class OnePassRound(MaskTokenRound):
    """Drafts the trees of one round with mask tokens and the bigram."""

    def forward_all_levels(self, level: TreeLevel, k: int) -> tuple[torch.Tensor, ...]:
        logprobs, ids, _ = super().forward_all_levels(level, k)
        return logprobs, ids, self._bound.block.successor_weights(ids)

    def corrected_scores(self, level: TreeLevel, topk: LevelTopk) -> torch.Tensor:
        draft_ids = self._bound.target_to_draft_ids
        parent_ids = level.tokens if draft_ids is None else draft_ids[level.tokens]
        return topk.logprobs + self._bound.block.correction(parent_ids, topk.correction_inputs[:, 0])


class OnePassDraft(Eagle3Draft):
    """A trained one-pass draft, with a level for the root and for each mask token."""

    kind, label = KIND, "one-pass"
    shape_type, module_type, round_type = OnePassShape, OnePassBlock, OnePassRound
