"""Products with the matrices of chosen experts. See products.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from longdraft.native.boundary import FLOATS, address
from longdraft.native.header import ENUMS, Long
from longdraft.native.library import Kernels
from longdraft.native.stored import Stored
from longdraft.native.structures import Matrix


@dataclass(frozen=True)
class ExpertWeights:
    """A matrix (out, in) and a bias for each of E experts.

    Attributes:
        matrices: (E, out, in) float32 with contiguous rows; or stored, the experts' rows one behind the other.
        bias: (E, out) float32, or None.
        by_input: the tensor is (E, in, out) instead.
        count: E.
    """

    matrices: torch.Tensor | Stored
    bias: torch.Tensor | None = None
    by_input: bool = False
    count: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.matrices, Stored):
            object.__setattr__(self, "count", self.matrices.shape[0])

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of each matrix."""
        if isinstance(self.matrices, Stored):
            outs, size = self.matrices.shape
            return outs // self.count, size
        outs, size = self.matrices.shape[1:]
        return (size, outs) if self.by_input else (outs, size)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        data = self.matrices.data if isinstance(self.matrices, Stored) else self.matrices
        return (data,) if self.bias is None else (data, self.bias)

    def expert(self, number: int) -> ctypes.Structure:
        """The structure of one expert's matrix, without a place for its results."""
        w, outs = self.matrices, self.shape[0]
        bias = None if self.bias is None else address(self.bias[number], size=outs)
        if isinstance(w, Stored):
            place, row, int8 = w.place(number * outs)
            return Matrix(place, bias, None, row, outs, 0, w.number, int8)
        form = ENUMS["Format"]["BY_INPUT" if self.by_input else "FLOAT32"]
        return Matrix(address(w[number], rows=True), bias, None, w.stride(1) * 4, outs, 0, form, 0)


class ExpertProducts:
    """Multiplies rows with the matrices of experts, of which each has one of every kind in ``weights``, in one loop.

    Attributes:
        shape: (out, in) of each matrix.
        count: number of experts.
    """

    def __init__(self, kernels: Kernels, weights: Sequence[ExpertWeights]) -> None:
        self.shape, self.count = weights[0].shape, weights[0].count
        if any((each.shape, each.count) != (self.shape, self.count) for each in weights):
            raise ValueError("the matrices of an expert that get the same rows have one shape")
        self._weights = tuple(weights)  # keeps their memory
        self._table = (Matrix * (self.count * len(weights)))(
            *(each.expert(e) for e in range(self.count) for each in weights)
        )
        self._call = kernels.call

    def __call__(self, x: torch.Tensor, experts: Sequence[int], starts: Sequence[int]) -> torch.Tensor:
        """Rows x (rows, in) times the matrices of their experts -> (kinds, rows, out).

        Args:
            experts: numbers of experts.
            starts: one more number: rows [starts[i], starts[i + 1]) of x are those of expert i, at least one.
        """
        x, kinds, groups = x.contiguous(), len(self._weights), len(experts)
        out = torch.empty(kinds, x.shape[0], self.shape[0], **FLOATS)
        numbers, places = (Long * groups)(*experts), (Long * (groups + 1))(*starts)
        self._call("experts", address(x), x.shape[1], self._table, kinds, numbers, places, groups, address(out))
        return out
