"""Linear layers whose file holds them in several stored matrices, or with rows or columns in another order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from longdraft.model.stored import StoredLinear
from longdraft.native import Stored


@dataclass(frozen=True)
class Arranged:
    """A matrix (out, in) as a file holds it.

    Attributes:
        parts: matrices (out of a part, in), whose rows lie one behind the other.
        rows: (out,) place in the parts of each row; None: as they are.
        columns: (in,) place in the parts of each column; None: as they are.
    """

    parts: tuple[Stored, ...]
    rows: torch.Tensor | None = None
    columns: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]


class ArrangedLinear(nn.Module):
    """``nn.Linear`` without a bias that puts inputs and outputs in order, so that no stored block is changed."""

    rows: torch.Tensor | None
    columns: torch.Tensor | None
    places: torch.Tensor | None

    def __init__(self, matrix: Arranged) -> None:
        super().__init__()
        self.out_features, self.in_features = matrix.shape
        parts = [StoredLinear(part) for part in matrix.parts]
        for part in parts:
            part.inside = True
        self.parts = nn.ModuleList(parts)
        self.register_buffer("rows", matrix.rows, persistent=False)
        self.register_buffer("columns", matrix.columns, persistent=False)
        places = None if matrix.columns is None else matrix.columns.argsort()
        self.register_buffer("places", places, persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """The matrix in float32, unpacked in every call."""
        whole = torch.cat([part.weight for part in self.parts if isinstance(part, StoredLinear)])
        whole = whole if self.rows is None else whole[self.rows]
        return whole if self.columns is None else whole[:, self.columns]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., in) -> (..., out), in x's dtype."""
        if self.places is not None:
            x = x[..., self.places]
        products = [part(x) for part in self.parts]
        out = products[0] if len(products) == 1 else torch.cat(products, dim=-1)
        return out if self.rows is None else out[..., self.rows]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight
