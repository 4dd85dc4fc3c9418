"""The module of EAGLE-1 and EAGLE-2 (Li et al. 2024, arXiv:2401.15077, section 3.1, and arXiv:2406.16858).

    f_t                                     the target's last hidden state at position t, behind its final norm
    n_t = fc([embed(token_{t+1}), f_t])     back to the hidden size
    a_t = n_t + Attn(n_t)                   no norm before it; RoPE at position t
    o_t = a_t + SwiGLU(RMSNorm(a_t))
    logits of token_{t+2} = target_head(o_t)

o is what the target's next f would be, and stands in for it further on, so no norm comes before the head. Embedding,
final norm and head are the target's own, by reference. EAGLE-2 changed the tree alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from longdraft.drafters.eagle3_block import Eagle3Block, Eagle3Shape, Layer

Call = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class EagleShape(Eagle3Shape):
    """Sizes of the module.

    Attributes:
        feature_size, vocabulary: the target's hidden size and vocabulary.
        fc_bias: whether fc has a bias.
    """

    fc_bias: bool = False


class EagleBlock(Eagle3Block):
    """The module. Its state dict is the published layout, with the layer named as EAGLE-3's is."""

    def __init__(self, shape: EagleShape) -> None:
        nn.Module.__init__(self)
        self.shape = shape
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=shape.fc_bias)
        self.midlayer = Layer(shape, joins=False)

    def borrow(self, norm: Call, head: Call) -> None:
        """Takes the target's final norm, (T, hidden) -> (T, hidden), and its head, (T, hidden) -> (T, vocabulary)."""
        self._norm, self._head = norm, head

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """Outputs of the target's last layer (T, hidden) -> f (T, hidden)."""
        return self._norm(features)

    def joined(self, x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        n = self.fc(torch.cat([x, g], -1))
        return n, n

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        return self._head(out)
