"""TokenSwift's chained heads, for training and inference alike (Wu et al. 2025, arXiv:2502.18890).

    h_i = h_{i-1} + W_i RMSNorm(h_{i-1})        i = 1 .. heads
    logits_i = target_head(RMSNorm(h_i))        the target's own head, by reference

h_0 is the target's hidden state of a token before its final norm: what its own head says the next token by. The i-th
head says the i-th token after that one. The norm before the target's head begins as the target's final norm.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

# Fresh heads say the token before theirs. They should not be as sure of it as the target is of its own.
UNSURE = 0.3


@dataclass(frozen=True)
class HeadsShape:
    """Sizes. The hidden size is the target's."""

    hidden_size: int
    heads: int
    rms_norm_eps: float = 1e-6

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Head(nn.Module):
    """One step: from the state that says a token to the state that says the next one."""

    def __init__(self, shape: HeadsShape) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = h + self.proj(self.norm(h))
        return out


class HeadsBlock(nn.Module):
    """The heads, and the norm before the target's head."""

    def __init__(self, shape: HeadsShape) -> None:
        super().__init__()
        self.shape = shape
        self.heads = nn.ModuleList(_Head(shape) for _ in range(shape.heads))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def initialise(self, final_norm: torch.Tensor, size: float = 1.0) -> None:
        """Zero projections: at first every head repeats what the target itself says, less surely.

        Args:
            final_norm: (hidden,) weight of the target's.
            size: of a number of the target's states, root of the mean square. A step of training then moves states of
                any size as far.
        """
        with torch.no_grad():
            for name, weight in self.heads.named_parameters():
                weight.fill_(size if name.endswith("norm.weight") else 0.0)
            self.norm.weight.copy_(UNSURE * final_norm)

    def forward(self, h: torch.Tensor, heads: int | None = None) -> list[torch.Tensor]:
        """h (rows, hidden) -> for each of the first ``heads`` heads, (rows, hidden): the input of the target's head."""
        found = []
        for head in self.heads[:heads]:
            h = head(h)
            found.append(self.norm(h))
        return found
