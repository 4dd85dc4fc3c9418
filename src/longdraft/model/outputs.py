"""Results of a target's forward, and the request for those besides logits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.errors import NumericalError


@dataclass(frozen=True)
class Taps:
    """Requests results of a forward besides logits.

    Attributes:
        hidden: indices of decoder layers whose output hidden states are returned (0 is the first layer).
        queries: indices of layers whose queries, after RoPE, are returned. (All KV is in the store.)
    """

    hidden: tuple[int, ...] = ()
    queries: tuple[int, ...] = ()


NO_TAPS = Taps()


@dataclass
class TargetOutput:
    """Attributes:
    logits: (B, T, vocabulary), or (B, 1, vocabulary) of the last token, or None; float32.
    hidden: layer index -> (B, T, hidden size).
    queries: layer index -> (B, query heads, T, head size).
    """

    logits: torch.Tensor | None
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    queries: dict[int, torch.Tensor] = field(default_factory=dict)

    def scatter_from(self, part: TargetOutput, batch: ForwardBatch, sequences: range, tokens: range) -> None:
        """Copies the results of a part of ``batch`` (these ranges) from the start of the tensors in ``part``."""
        rows, columns = slice(sequences.start, sequences.stop), slice(tokens.start, tokens.stop)
        assert part.logits is not None
        if self.logits is None:
            self.logits = _empty_for_batch(part.logits, batch, 1)
        self.logits[rows, columns] = part.logits[:, : len(tokens)]
        for layer, x in part.hidden.items():
            self.hidden.setdefault(layer, _empty_for_batch(x, batch, 1))[rows, columns] = x[:, : len(tokens)]
        for layer, x in part.queries.items():
            self.queries.setdefault(layer, _empty_for_batch(x, batch, 2))[rows, :, columns] = x[:, :, : len(tokens)]


def _empty_for_batch(x: torch.Tensor, batch: ForwardBatch, token_dim: int) -> torch.Tensor:
    """An empty tensor like ``x`` for a whole batch, whose tokens are dimension ``token_dim``."""
    shape = [batch.batch_size, *x.shape[1:]]
    shape[token_dim] = batch.query_len
    return x.new_empty(shape)


def model_name(model: Any) -> str:
    """A model's name or path, for messages."""
    return str(getattr(model, "name_or_path", "") or "the model")


def nan_logits_error(model: Any) -> NumericalError:
    """The error for a target's NaN logits."""
    return NumericalError(
        f"The logits of {model_name(model)} are NaN. A float16 overflow or a damaged "
        "checkpoint is the usual cause: load the model with dtype='bfloat16' or 'float32', or check its files."
    )
