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
        count: E, of stored ones.
    """

    matrices: torch.Tensor | Stored
    bias: torch.Tensor | None = None
    by_input: bool = False
    count: int = 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, out, in)."""
        if isinstance(self.matrices, Stored):
            outs, size = self.matrices.shape
            return self.count, outs // self.count, size
        count, outs, size = self.matrices.shape
        return (count, size, outs) if self.by_input else (count, outs, size)

    def expert(self, number: int) -> ctypes.Structure:
        """The structure of one expert's matrix, without a place for its results."""
        w, outs = self.matrices, self.shape[1]
        bias = None if self.bias is None else address(self.bias[number], size=outs)
        if isinstance(w, Stored):
            place, row, int8 = w.place(number * outs)
            return Matrix(place, bias, None, row, outs, 0, w.number, int8)
        form = ENUMS["Format"]["BY_INPUT" if self.by_input else "FLOAT32"]
        return Matrix(address(w[number], rows=True), bias, None, w.stride(1) * 4, outs, 0, form, 0)


class ExpertProducts:
    """Multiplies rows with the matrices of experts, of which each has one of every kind in ``weights``, in one loop."""

    def __init__(self, kernels: Kernels, weights: Sequence[ExpertWeights]) -> None:
        count, self._outs, _ = weights[0].shape
        if any(each.shape != weights[0].shape for each in weights):
            raise ValueError("the matrices of an expert that get the same rows have one shape")
        self._weights = tuple(weights)  # keeps their memory
        self._table = (Matrix * (count * len(weights)))(*(each.expert(e) for e in range(count) for each in weights))
        self._call = kernels.call

    def __call__(self, x: torch.Tensor, experts: Sequence[int], starts: Sequence[int]) -> torch.Tensor:
        """Rows x (rows, in) times the matrices of their experts -> (kinds, rows, out).

        Args:
            experts: numbers of experts.
            starts: one more number: rows [starts[i], starts[i + 1]) of x are those of expert i, at least one.
        """
        x, kinds, groups = x.contiguous(), len(self._weights), len(experts)
        out = torch.empty(kinds, x.shape[0], self._outs, **FLOATS)
        numbers, places = (Long * groups)(*experts), (Long * (groups + 1))(*starts)
        self._call("experts", address(x), x.shape[1], self._table, kinds, numbers, places, groups, address(out))
        return out
