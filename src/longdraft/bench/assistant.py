"""A draft of ours as an assistant that ``transformers``' ``generate`` can use.

``generate`` wants logits over the target's whole vocabulary; the head of a shipped draft has fewer rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from longdraft.drafts import shipped
from longdraft.drafts.language_model import KIND, SmallLMDraft
from longdraft.errors import CapabilityError
from longdraft.model.runner import TargetRunner

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class WideHead(nn.Module):
    """A head of few rows, its logits spread over a larger vocabulary; all other tokens have -inf.

    Args:
        head: hidden states -> logits (..., n).
        ids: (n,) token id of each row.
        vocabulary: size of the larger vocabulary.
    """

    ids: torch.Tensor

    def __init__(self, head: nn.Module, ids: torch.Tensor, vocabulary: int) -> None:
        super().__init__()
        self.head, self._vocabulary = head, vocabulary
        self.register_buffer("ids", ids, persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(hidden)
        wide = logits.new_full((*logits.shape[:-1], self._vocabulary), -torch.inf)
        wide[..., self.ids] = logits
        return wide


def assistant(runner: TargetRunner, name: str | Path | None = None) -> tuple[PreTrainedModel, Path]:
    """A causal language model with the target's vocabulary, and the folder it was read from.

    Args:
        name: draft folder of ours, or folder or hub id of a model of transformers; None: the shipped draft.

    Raises:
        CapabilityError: none is named, and the package ships none for this target.
        CheckpointError: it cannot be read, or has another vocabulary.
        UnsupportedModelError: it cannot be hosted, or the target shares nothing with drafts.
    """
    folder = name if name is not None else shipped.fitting(runner.parts.description, KIND)
    if folder is None:
        raise CapabilityError(
            "hf-assisted needs a small language model with the target's vocabulary, and none comes with longdraft for "
            "this model: name one with --assistant DIR, or leave hf-assisted out."
        )
    draft = SmallLMDraft.load(folder)  # read anew: the model below is changed, and a method may use the other one
    bound = draft.bound(runner)
    model = bound.runner.model
    if bound.ids is not None:
        model.lm_head = WideHead(model.lm_head, bound.ids, runner.vocab_size)
        model.config.vocab_size = runner.vocab_size
    return model, draft.folder
