"""The training step of chained heads: from a few documents' features to the loss of all heads, summed.

Row t holds the target's hidden state of token t before the final norm, by which the target itself says token t+1; head
i says token t+1+i. The target is not trained, and no head sees a token that comes after t.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from longdraft.drafters.heads_block import HeadsBlock
from longdraft.host.parts import SharedParts
from longdraft.training.features import Features
from longdraft.training.longspec import StepOutput
from longdraft.training.losses import soft_cross_entropy, targets
from longdraft.training.vocabulary import to_draft


class HeadsTrainee(nn.Module):
    """The heads with what they borrow from the target. They alone have parameters.

    Args:
        kept: (V',) target ids of the draft's vocabulary, None for all.
        decay: weight of a head, against the one before.
        distill: share of the loss that follows the target's own distribution.
        head_dtype: of the products with the target's head.
    """

    def __init__(
        self,
        block: HeadsBlock,
        parts: SharedParts,
        kept: torch.Tensor | None = None,
        decay: float = 1.0,
        distill: float = 0.0,
        head_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.block = block
        self.decay, self.distill = decay, distill
        head = parts.head if kept is None else parts.head[kept.to(parts.head.device)]
        self._head = head.detach().to(head_dtype)
        vocabulary = parts.head.shape[0]
        self._to_draft = to_draft(torch.arange(vocabulary) if kept is None else kept.cpu(), vocabulary).to(head.device)

    def forward(
        self, documents: Sequence[Features], shifts: Sequence[int] = (), levels: int | None = None
    ) -> StepOutput:
        """The loss of a packed batch, summed over rows and, with their weights, over heads.

        Args:
            shifts: not used: every row goes through every head.
            levels: as many as there are heads, for measuring.

        Returns:
            ``depths`` are 1 for the first head, and so on.
        """
        count, device = self.block.shape.heads, self._head.device
        states, rows, truth, likely, log_probs = [], [], [], [], []
        sizes = [0]
        for document in documents:
            first, end = document.start - 1, len(document.tokens) - 2  # the last two tokens are said, not read
            if first >= end:
                raise ValueError(f"a document of {len(document.tokens)} tokens has none to learn from {first + 1} on")
            states.append(document.hidden[first:end])
            # What stands at [1 + first ...] of these follows the root, which the target says itself.
            truth.append(document.tokens[first + 2 :])
            likely.append(document.top_ids[1:])
            log_probs.append(document.top_log_probs[1:])
            sizes.append(sizes[-1] + end - first)
        for i in range(count):  # head i + 1 of the rows that have a token so far behind them
            rows.append(torch.cat([torch.arange(a, max(a, b - i)) for a, b in pairwise(sizes)]))
        with torch.no_grad():
            wanted = self._to_draft[torch.cat(truth).to(device)]
            near = self._to_draft[torch.cat(likely).to(device)]
            ids, weights = targets(wanted, near, torch.cat(log_probs).to(device), self.distill)
        # Float32: sums of the residual stream are; the products are autocast's.
        said = self.block(torch.cat(states).to(device).float())
        hidden = torch.cat([out[row.to(device)] for out, row in zip(said, rows, strict=True)])
        # Head i + 1 of row r says what head 1 of row r + i does.
        target = torch.cat([row + i for i, row in enumerate(rows)]).to(device)
        depths = torch.cat([torch.full_like(row, i + 1) for i, row in enumerate(rows)]).to(device)
        loss, ranks = soft_cross_entropy(
            hidden, self._head, ids[target], weights[target] * (self.decay ** (depths - 1))[:, None]
        )
        return StepOutput(loss, torch.where(wanted[target] >= 0, ranks, len(self._head)), depths)
