"""P-EAGLE: EAGLE-3's layer says all levels of a tree in one forward, from published folders (arXiv:2602.01469).

    row 0:         x = embed(root),  g = fc(f_t)        the row that EAGLE-3 begins with
    row k > 0:     x = embed(mask),  g = fc(s)          s learned, as long as f_t; sees rows 0 .. k - 1
    logits_k = head(RMSNorm(o_k))

Levels do not know each other's tokens: those of a level are the same behind every node. It drafts as
:mod:`longdraft.drafters.onepass` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from longdraft.drafters.eagle3 import Eagle3Draft
from longdraft.drafters.onepass import OnePassDrafter, OnePassRound, Row
from longdraft.drafters.shared.eagle3_block import Eagle3Block
from longdraft.drafters.shared.eagle3_round import BoundDraft
from longdraft.drafts.draft_folder import shape_of
from longdraft.drafts.eagle_formats import PEAGLE, Eagle3Shape, check_mask
from longdraft.drafts.kinds import Kind, register
from longdraft.engine.sequence import Sequence
from longdraft.model.runner import TargetRunner
from longdraft.trees.level import Level


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


class PEagleDraft(Eagle3Draft):
    """A draft as `speculators` writes it, or as EAGLE-3's are published."""

    kind, label = PEAGLE, "P-EAGLE"

    @cached_property
    def shape(self) -> PEagleShape:
        return shape_of(PEagleShape, self.config, self.folder, self.label)

    def module(self) -> PEagleBlock:
        return PEagleBlock(self.shape)

    def check(self, runner: TargetRunner) -> None:
        super().check(runner)
        rows = self.shape.embedding or runner.parts.head.shape[0]
        check_mask(self.shape.mask_token, rows, self.folder)


class PEagleDrafter(OnePassDrafter):
    """Drafts trees with one forward a round.

    Args:
        draft: a trained draft.
        options: as of the one-pass drafter.
    """

    def round_of(self, bound: BoundDraft, sequences: list[Sequence], depth: int) -> PEagleRound:
        return PEagleRound(self, bound, sequences, depth)


class PEagleRound(OnePassRound):
    """One round of a batch."""

    def behind(self, x: torch.Tensor, g: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        block = self._block
        mask = torch.full((1,), block.shape.mask_token, device=x.device, dtype=torch.long)
        embedded, state = self._bound.embedding(mask), block.project(block.mask_hidden.view(1, -1))
        return embedded.expand(count, -1), state.expand(count, -1)

    def beside(self, ids: torch.Tensor) -> torch.Tensor:
        return ids  # nothing corrects them

    def corrected(self, level: Level, row: Row) -> torch.Tensor:
        return row.log_probs.expand(-1, level.tokens.shape[1], -1)


register(
    Kind(
        PEAGLE,
        PEagleDraft.load,
        PEagleDrafter,
        "published drafts of P-EAGLE: EAGLE-3's layer, all levels of a tree in one forward",
        "P-EAGLE, arXiv:2602.01469",
        tensors=lambda names: any(name.split(".")[-1] == "mask_hidden" for name in names),
    )
)
