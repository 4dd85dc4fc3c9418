"""P-EAGLE: EAGLE-3's layer with one mask token, from published drafts (arXiv:2602.01469).

    input 0:       x = embed(root),   g = fc(f_t)     the root, where the target's features are f_t
    input k > 0:   x = embed(mask),   g = fc(s)       mask tokens, all alike; s is learned

One forward drafts all levels of a tree, so a level's logits do not depend on other levels' tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from longdraft.drafters.eagle3 import Eagle3Block, Eagle3Draft
from longdraft.drafters.shared.draft_batch import DraftBatch
from longdraft.drafters.shared.single_forward import SingleForwardRound
from longdraft.drafts.eagle_formats import PEAGLE, Eagle3Shape
from longdraft.drafts.formats import check_mask_token
from longdraft.model.runner import TargetRunner
from longdraft.trees.level import TreeLevel


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

    def mask_token_inputs(self, embedding: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns x and g (1, hidden) of a mask token. ``embedding``: the token embedding."""
        mask = torch.full((1,), self.shape.mask_token, device=self.mask_hidden.device, dtype=torch.long)
        return embedding(mask), self.project_features(self.mask_hidden.view(1, -1))


class PEagleRound(SingleForwardRound):
    """Drafts the trees of one round with mask tokens."""

    def forward_all_levels(self, level: TreeLevel, k: int) -> tuple[torch.Tensor, ...]:
        """Runs the forward over new and mask tokens. ``_next_rotary``: the mask tokens' cos and sin, of root_inputs."""
        bound, block, num_masks = self._bound, self._bound.block, self._depth - 1
        batch, (tokens, cos, sin, features) = self.root_inputs(level)
        x, g = bound.embedding(tokens), block.project_features(features)
        masks = (t.expand(len(x), num_masks, -1) for t in block.mask_token_inputs(bound.embedding))
        x, g = (torch.cat(parts, 1) for parts in zip((x, g), masks, strict=True))
        cos, sin = (torch.cat(parts, 1) for parts in zip((cos, sin), self._next_rotary, strict=True))
        batch = DraftBatch.from_new_tokens(self._cache, batch.slots, batch.query_len, num_mask_tokens=num_masks)
        _, *topk = self.forward(batch, (x, cos, sin, g), k)
        logprobs, ids = (t.view(len(level.sequence_indices), batch.num_outputs, -1) for t in topk)
        return logprobs, ids, ids


class PEagleDraft(Eagle3Draft):
    """A draft in the layout of `speculators`, or in EAGLE-3's published layout."""

    kind, label = PEAGLE, "P-EAGLE"
    shape_type, module_type, round_type = PEagleShape, PEagleBlock, PEagleRound

    def check(self, runner: TargetRunner) -> None:
        super().check(runner)
        check_mask_token(self.shape, runner.shared_parts.head.shape[0], self.folder)
