"""LongSpec's training step: from a few documents' features to the loss of one block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from longdraft.drafters.longspec_block import LongSpecBlock
from longdraft.host.parts import SharedParts
from longdraft.training import liger
from longdraft.training.features import Features
from longdraft.training.losses import soft_cross_entropy, targets
from longdraft.training.noisy_attention import noisy, windowed
from longdraft.training.vocabulary import to_draft


class StepOutput(NamedTuple):
    """A tuple, so that FSDP finds the loss in it.

    Attributes:
        loss: summed over the learned rows, with its graph.
        ranks: (rows,) how many tokens the draft holds likelier than the text's next: 0 is a hit. None where the loss
            came from a kernel that does not tell.
        depths: (rows,) the shift j that each row was trained for: 1 for the root's.
    """

    loss: torch.Tensor
    ranks: torch.Tensor | None
    depths: torch.Tensor


class LongSpecTrainee(nn.Module):
    """The block with what it borrows from the target. The block alone has parameters.

    Args:
        kept: (V',) target ids of the draft's vocabulary, None for all.
        distill: share of the loss that follows the target's own distribution.
        head_dtype: of the head's matrix products.
    """

    def __init__(
        self,
        block: LongSpecBlock,
        parts: SharedParts,
        kept: torch.Tensor | None = None,
        distill: float = 0.0,
        head_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.block = block
        self.distill = distill
        self._parts = parts  # no module: nothing of the target is registered, so none of it is trained or saved
        head = parts.head if kept is None else parts.head[kept.to(parts.head.device)]
        self._head = head.detach().to(head_dtype)
        vocabulary = parts.head.shape[0]
        self._to_draft = to_draft(torch.arange(vocabulary) if kept is None else kept.cpu(), vocabulary).to(head.device)

    def forward(self, documents: Sequence[Features], shifts: Sequence[int]) -> StepOutput:
        """The loss of a packed batch: documents lie end to end, and none sees another.

        Args:
            shifts: j of each document (flash noisy training): cross-attention's newest key lies j positions back.
        """
        window = self.block.shape.window
        inputs, positions, rows, next_tokens, top_ids, top_log_probs, depths = [], [], [], [], [], [], []
        input_rows: list[int] = []
        query_rows: list[int] = []
        for d, shift in zip(documents, shifts, strict=True):
            end = len(d.tokens) - 1  # the last token predicts nothing
            first = max(d.start - 1, shift)  # earlier rows have no key that far back
            if first >= end:
                raise ValueError(f"a document of {len(d.tokens)} tokens has none to learn at shift {shift}")
            low = max(0, first - window + 1)
            inputs.append(d.tokens[low:end])
            positions.append(d.positions[low:end])
            rows.append(torch.arange(first - low, end - low) + sum(input_rows))
            next_tokens.append(d.tokens[first + 1 : end + 1])
            top_ids.append(d.top_ids[first + 1 - d.start :])
            top_log_probs.append(d.top_log_probs[first + 1 - d.start :])
            depths.append(torch.full((end - first,), shift))
            input_rows.append(end - low)
            query_rows.append(end - first)
        device = self._head.device
        with torch.no_grad():
            x = self._parts.embedding(torch.cat(inputs).to(device)).float()
        cos, sin = self._parts.rotary(torch.cat(positions).to(device))

        # Split, never sliced: the gradient of a slice is as large as what it was cut from.
        def self_attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            each = zip(q.split(query_rows, 1), k.split(input_rows, 1), v.split(input_rows, 1), strict=True)
            return torch.cat([windowed(*qkv, window) for qkv in each], 1)

        def cross_attend(q: torch.Tensor) -> torch.Tensor:
            # The row behind the last learned one has its KV too, and nobody may see it.
            each = zip(q.split(query_rows, 1), documents, shifts, strict=True)
            out = [noisy(q, d.keys[:, :-1].to(device), d.values[:, :-1].to(device), j) for q, d, j in each]
            return torch.cat(out, 1)

        hidden = self.block(x, cos, sin, self_attend, cross_attend, torch.cat(rows).to(device))
        truth = torch.cat(next_tokens).to(device)
        levels = torch.cat(depths).to(device)
        if self.training and self.distill == 0 and (fused := liger.cross_entropy(device)) is not None:
            return StepOutput(fused(hidden, self._head, self._to_draft[truth]), None, levels)
        ids, weights = targets(
            self._to_draft[truth], self._to_draft[torch.cat(top_ids).to(device)], torch.cat(top_log_probs).to(device),
            self.distill,
        )  # fmt: skip
        loss, ranks = soft_cross_entropy(hidden, self._head, ids, weights)
        ranks = torch.where(self._to_draft[truth] >= 0, ranks, len(self._head))
        return StepOutput(loss, ranks, levels)
