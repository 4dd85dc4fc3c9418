"""P-EAGLE: EAGLE-3's layer with one mask token, from published drafts (arXiv:2602.01469).

    input 0:       x = embed(root),   g = fc(f_t)     the root, where the target's features are f_t
    input k > 0:   x = embed(mask),   g = fc(s)       mask tokens, all alike; s is learned

A round runs as in one-pass drafts (:mod:`longdraft.drafters.onepass`), without a bigram, so a level's logits do not
depend on other levels' tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from longdraft.drafters.eagle3 import Eagle3Block, Eagle3Draft
from longdraft.drafters.shared.single_forward import MaskTokenRound
from longdraft.drafts.eagle_formats import PEAGLE, Eagle3Shape
from longdraft.drafts.formats import check_mask_token
from longdraft.model.runner import TargetRunner


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


class PEagleDraft(Eagle3Draft):
    """A draft in the layout of `speculators`, or in EAGLE-3's published layout."""

    kind, label = PEAGLE, "P-EAGLE"
    shape_type, module_type, round_type = PEagleShape, PEagleBlock, MaskTokenRound

    def check(self, runner: TargetRunner) -> None:
        super().check(runner)
        check_mask_token(self.shape, runner.shared_parts.head.shape[0], self.folder)
