"""P-EAGLE: EAGLE-3's layer says all levels of a tree in one forward, from published folders (arXiv:2602.01469).

    row 0:         x = embed(root),  g = fc(f_t)        the row that EAGLE-3 begins with
    row k > 0:     x = embed(mask),  g = fc(s)          s learned, as long as f_t; sees rows 0 .. k - 1
    logits_k = head(RMSNorm(o_k))

Levels do not know each other's tokens: those of a level are the same behind every node. It drafts as
:mod:`longdraft.drafters.onepass` does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from longdraft.drafters.eagle3 import Eagle3Draft
from longdraft.drafters.onepass import OnePassDrafter
from longdraft.drafters.shared.eagle3_block import Eagle3Block
from longdraft.drafts.eagle_formats import PEAGLE, Eagle3Shape
from longdraft.drafts.formats import check_mask
from longdraft.drafts.kinds import Kind, register
from longdraft.model.runner import TargetRunner


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

    def behind(
        self, x: torch.Tensor, g: torch.Tensor, rows: slice, embedding: nn.Module
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs (B, T, hidden) of some of the rows k > 0, the same behind every anchor."""
        size, count = x.shape[2], rows.stop
        mask = torch.full((1,), self.shape.mask_token, device=x.device, dtype=torch.long)
        state = self.project(self.mask_hidden.view(1, -1))
        return embedding(mask).expand(len(x), count, size), state.expand(len(x), count, size)

    def beside(self, ids: torch.Tensor) -> torch.Tensor:
        return ids

    def correction(self, before: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        """Nothing: levels do not know each other's tokens."""
        return torch.zeros(*before.shape, 1, dtype=torch.float32, device=before.device)


class PEagleDraft(Eagle3Draft):
    """A draft as `speculators` writes it, or as EAGLE-3's are published."""

    kind, label = PEAGLE, "P-EAGLE"
    shape_type, module_type = PEagleShape, PEagleBlock

    def check(self, runner: TargetRunner) -> None:
        super().check(runner)
        rows = self.shape.embedding or runner.parts.head.shape[0]
        check_mask(self.shape.mask_token, rows, self.folder)


register(
    Kind(
        PEAGLE,
        OnePassDrafter,
        "published drafts of P-EAGLE: EAGLE-3's layer, all levels of a tree in one forward",
        "P-EAGLE, arXiv:2602.01469",
        load=PEagleDraft.load,
        tensors=lambda names: any(name.split(".")[-1] == "mask_hidden" for name in names),
    )
)
