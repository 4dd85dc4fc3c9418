"""The training step of a small language model that drafts: from a few documents' features to its loss.

It is trained as any language model, on text that is short on purpose: while drafting it sees as much at once and no
more (SpecExtend keeps the keys that matter and rotates them to the positions of a short text, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from longdraft.host import small_models
from longdraft.host.parts import SharedParts
from longdraft.training.features import Features
from longdraft.training.longspec import StepOutput
from longdraft.training.losses import soft_cross_entropy, targets
from longdraft.training.noisy_attention import causal
from longdraft.training.vocabulary import to_draft


class LmTrainee(nn.Module):
    """The decoder with what it borrows from the target. The decoder alone has parameters.

    Args:
        decoder: as :func:`longdraft.host.small_models.decoder` makes it.
        kept: (V',) target ids of the draft's vocabulary, None for all.
        distill: share of the loss that follows the target's own distribution.
        head_dtype: of the head's matrix products.
    """

    def __init__(
        self,
        decoder: nn.Module,
        parts: SharedParts,
        kept: torch.Tensor | None = None,
        distill: float = 0.8,
        head_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.decoder = decoder
        self.distill = distill
        self._parts = parts  # no module: nothing of the target is registered, so none of it is trained or saved
        head = parts.head if kept is None else parts.head[kept.to(parts.head.device)]
        self._head = head.detach().to(head_dtype)
        vocabulary = parts.head.shape[0]
        self._to_draft = to_draft(torch.arange(vocabulary) if kept is None else kept.cpu(), vocabulary).to(head.device)

    def forward(self, documents: Sequence[Features], shifts: Sequence[int] = ()) -> StepOutput:
        """The loss of a packed batch: documents lie end to end, and none sees another.

        Args:
            shifts: not used.
        """
        lengths = [len(d.tokens) - 1 for d in documents]  # the last token predicts nothing
        firsts = [d.start - 1 for d in documents]
        begins = [sum(lengths[:i]) for i in range(len(lengths))]
        device = self._head.device
        each = list(zip(begins, firsts, lengths, strict=True))
        rows = torch.cat([torch.arange(at + first, at + length) for at, first, length in each]).to(device)
        with torch.no_grad():
            ids = torch.cat([d.tokens[:-1] for d in documents]).to(device)
            x = self._parts.embedding(ids).float()
            truth = self._to_draft[torch.cat([d.tokens[d.start :] for d in documents]).to(device)]
            likely = self._to_draft[torch.cat([d.top_ids for d in documents]).to(device)]
            log_probs = torch.cat([d.top_log_probs for d in documents]).to(device)
            wanted, weights = targets(truth, likely, log_probs, self.distill)
        positions = torch.cat([torch.arange(n) for n in lengths]).to(device)

        # Split, never sliced: the gradient of a slice is as large as what it was cut from.
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            parts = zip(q.split(lengths, 1), k.split(lengths, 1), v.split(lengths, 1), strict=True)
            return torch.cat([causal(*qkv) for qkv in parts], 1)

        hidden = small_models.hidden_states(self.decoder, x, positions, attend)
        loss, ranks = soft_cross_entropy(hidden[rows], self._head, wanted, weights)
        return StepOutput(loss, torch.where(truth >= 0, ranks, len(self._head)), torch.ones_like(ranks))
