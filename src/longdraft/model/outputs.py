"""Results of a target's forward: those that are asked for besides logits, and those that it returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.errors import NumericalError


@dataclass(frozen=True)
class Taps:
    """Results of a forward besides logits.

    Attributes:
        hidden: indices of decoder layers whose output hidden states are returned (0 is the first layer).
        queries: indices of layers whose queries, after RoPE, are returned. (The store has the KV of every layer.)
    """

    hidden: tuple[int, ...] = ()
    queries: tuple[int, ...] = ()


NO_TAPS = Taps()


@dataclass
class TargetOutput:
    """Attributes:
    logits: (B, T, vocabulary), or (B, 1, vocabulary) of the last row, or None; float32.
    hidden: layer index -> (B, T, hidden size).
    queries: layer index -> (B, query heads, T, head size).
    """

    logits: torch.Tensor | None
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)
    queries: dict[int, torch.Tensor] = field(default_factory=dict)

    def scatter_from(self, part: TargetOutput, block: ForwardBatch, sequences: range, rows: range) -> None:
        """Takes the results of some sequences' rows, which come first in ``part``, as those of a block."""
        of, at = slice(sequences.start, sequences.stop), slice(rows.start, rows.stop)
        assert part.logits is not None
        if self.logits is None:
            self.logits = _room(part.logits, block, 1)
        self.logits[of, at] = part.logits[:, : len(rows)]
        for layer, x in part.hidden.items():
            self.hidden.setdefault(layer, _room(x, block, 1))[of, at] = x[:, : len(rows)]
        for layer, x in part.queries.items():
            self.queries.setdefault(layer, _room(x, block, 2))[of, :, at] = x[:, :, : len(rows)]


def _room(like: torch.Tensor, block: ForwardBatch, axis: int) -> torch.Tensor:
    """An empty tensor for the rows of a block, which are the axis ``axis``."""
    size = [block.batch_size, *like.shape[1:]]
    size[axis] = block.query_len
    return like.new_empty(size)


def model_name(model: Any) -> str:
    """A model's name or place in messages."""
    return str(getattr(model, "name_or_path", "") or "the model")


def nan_logits_error(model: Any) -> NumericalError:
    """The error to raise if a target's logits are NaN."""
    return NumericalError(
        f"The logits of {model_name(model)} are NaN. A float16 overflow or a damaged "
        "checkpoint is the usual cause: load the model with dtype='bfloat16' or 'float32', or check its files."
    )
