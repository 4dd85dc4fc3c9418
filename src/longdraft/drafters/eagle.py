"""EAGLE-1 and EAGLE-2: a one-layer draft that predicts the target's last hidden states; loads published weights.

    f_t                                     the target's last hidden state at position t, after its final norm
    n_t = fc([embed(token_{t+1}), f_t])     fc maps the concatenated vectors back to the hidden size
    a_t = n_t + Attn(n_t)                   no norm before attention; RoPE at position t
    o_t = a_t + SwiGLU(RMSNorm(a_t))
    logits of token_{t+2} = target_head(o_t)

o_t predicts f_{t+1}, which is normed already, so there is no norm before the head. In the nodes of a tree, o_t replaces
f_{t+1}. Embedding, final norm and head are the target's, by reference. EAGLE-2 changed only the tree. Drafting
works as in EAGLE-3 (:mod:`longdraft.drafters.eagle3`), but with this module, and features from the last layer only.
Paper: Li et al. 2024, arXiv:2401.15077, section 3.1; EAGLE-2: arXiv:2406.16858.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from longdraft.drafters.eagle3 import Eagle3Draft
from longdraft.drafters.shared.draft_block import DraftBlock, DraftLayer
from longdraft.drafts.eagle_formats import EAGLE, EagleShape
from longdraft.errors import UnsupportedModelError
from longdraft.model.model_parts import norm_before_head
from longdraft.model.runner import TargetRunner
from longdraft.model.tensor_parallel import parallel_linear


class LastStateBlock(DraftBlock):
    """Base of blocks that predict the target's last hidden states, and use its final norm and head: EAGLE-1, MTP."""

    def borrow_target_head(
        self, runner: TargetRunner, head: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        """Makes this block use the target's final norm, and ``head`` (default: the target's).

        Raises:
            UnsupportedModelError: the target has no norm before its head.
        """
        if (norm := norm_before_head(runner.model)) is None:
            raise UnsupportedModelError(
                f"{type(runner.model).__name__} has no norm before its head, which this draft needs: use prompt-lookup."
            )
        # A bound method instead of the module, so that the target's weights stay out of the draft's state dict.
        self._target_norm = norm.__call__
        self.borrow_head(head or parallel_linear(runner.shared_parts.head))

    def project_features(self, features: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._target_norm(features)
        return out

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        return self.head(out)


class EagleBlock(LastStateBlock):
    """EAGLE's module. The state dict is the published layout, but the layer is called ``midlayer`` as in EAGLE-3."""

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=shape.fc_bias)
        self.midlayer = DraftLayer(shape, shape.hidden_size)
        self.norm = nn.Identity()  # o predicts f, which is normed already

    @property
    def first_layer(self) -> DraftLayer:
        return self.midlayer

    def combine_inputs(self, x: torch.Tensor, g: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        assert g is not None  # f_t of the module docstring
        n = self.fc(torch.cat([x, g], -1))
        return n, n  # no norm: attention reads the residual stream itself


class EagleDraft(Eagle3Draft):
    """A draft in the layout of EAGLE's authors."""

    kind, label = EAGLE, "EAGLE"
    shape_type, module_type = EagleShape, EagleBlock
    default_depth = 6  # levels of the authors' trees

    def default_feature_layers(self, num_layers: int) -> tuple[int, ...]:
        return (num_layers - 1,)

    def load_module(self, runner: TargetRunner) -> EagleBlock:
        block: EagleBlock = super().load_module(runner)
        block.borrow_target_head(runner)
        return block
