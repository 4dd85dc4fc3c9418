"""The one-pass drafter's module: EAGLE-3's, with rows for the tokens further on in the same forward.

    row 0:         x = embed(anchor),       g = fc(f_t)           the row that EAGLE-3 begins with
    row k > 0:     x = embed(anchor) + m_k, g = fc(f_t) + s_k     m_k, s_k learned; sees rows 0 .. k - 1 of its own
    logits_k = head(RMSNorm(o_k)) + W_out W_in[token before]

Rows behind the first stand where tokens are not known yet (P-EAGLE, arXiv:2602.01469); what depends on the token just
before is put right by a bigram of low rank (DSpark, arXiv:2607.05147), left to right, once there is one. So a tree of
any depth takes one forward of the module.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from longdraft.drafters.eagle3_block import Eagle3Block, Eagle3Shape


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
        self.slot_embedding = nn.Parameter(torch.zeros(ahead, shape.hidden_size))
        self.slot_state = nn.Parameter(torch.zeros(ahead, shape.hidden_size))
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
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
            self.bigram_out.weight.zero_()

    def behind(self, x: torch.Tensor, g: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs (T, hidden) of some of the rows k > 0, counted from 0, of anchors' x and g (T or 1, hidden)."""
        return x + self.slot_embedding[rows], g + self.slot_state[rows]

    def known(self, before: torch.Tensor) -> torch.Tensor:
        """What the bigram knows (..., rank) by draft ids (...); of -1, a token that the draft lacks, nothing."""
        found: torch.Tensor = self.bigram_in(before.clamp_min(0)) * (before >= 0)[..., None]
        return found
