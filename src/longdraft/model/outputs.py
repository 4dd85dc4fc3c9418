"""TargetOutput, the results of a target's forward, and Taps, which request results besides logits."""

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
        queries: indices of decoder layers whose queries, after RoPE, are returned."""

    hidden: tuple[int, ...] = ()
    queries: tuple[int, ...] = ()


NO_TAPS = Taps()


@dataclass
class TargetOutput:
    """Results of a forward over B sequences of T tokens.

    Attributes:
        logits: float32 (B, T, vocabulary), or (B, n, vocabulary) of the last n tokens; None if they were not requested.
        hidden: decoder layer index -> output hidden states (B, T, hidden size).
        queries: decoder layer index -> queries after RoPE (B, query heads, T, head size)."""

    logits: torch.Tensor | None
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    queries: dict[int, torch.Tensor] = field(default_factory=dict)

    def scatter_from(self, part: TargetOutput, batch: ForwardBatch, sequences: range, tokens: range) -> None:
        """Copies in ``part``, the results of these sequences and tokens of ``batch``, without padding in ``part``."""
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
    """Returns an uninitialized tensor like ``x``, for all tokens of a batch. Dimension ``token_dim`` counts tokens."""
    shape = [batch.batch_size, *x.shape[1:]]
    shape[token_dim] = batch.query_len
    return x.new_empty(shape)


def model_name(model: Any) -> str:
    """Returns a model's name or path, for messages."""
    return str(getattr(model, "name_or_path", "") or "the model")


def nan_logits_error(model: Any) -> NumericalError:
    """Makes the error for a target's NaN logits."""
    return NumericalError(
        f"The logits of {model_name(model)} are NaN. The usual cause is a float16 overflow or a damaged checkpoint: "
        "load the model with dtype='bfloat16' or 'float32', or check its files."
    )
