"""Products with the matrices of chosen experts. See products.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from longdraft.native.boundary import CPU_FLOAT32, address
from longdraft.native.header import ENUMS, Int64
from longdraft.native.library import Kernels
from longdraft.native.quantized_matrix import QuantizedMatrix
from longdraft.native.structures import Matrix


@dataclass(frozen=True)
class ExpertWeights:
    """A matrix (out, in) and a bias for each of E experts.

    Attributes:
        weight: (E, out, in) float32 with contiguous rows; or stored, the experts' rows one behind the other.
        bias: (E, out) float32, or None.
        transposed: the tensor is (E, in, out) instead.
        num_experts: E, of stored ones.
    """

    weight: torch.Tensor | QuantizedMatrix
    bias: torch.Tensor | None = None
    transposed: bool = False
    num_experts: int = 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, out, in)."""
        if isinstance(self.weight, QuantizedMatrix):
            outs, size = self.weight.shape
            return self.num_experts, outs // self.num_experts, size
        count, outs, size = self.weight.shape
        return (count, size, outs) if self.transposed else (count, outs, size)

    def expert_struct(self, expert_id: int) -> ctypes.Structure:
        """The structure of one expert's matrix, without a place for its results."""
        w, outs = self.weight, self.shape[1]
        bias = None if self.bias is None else address(self.bias[expert_id], min_numel=outs)
        if isinstance(w, QuantizedMatrix):
            place, row, int8 = w.kernel_address(expert_id * outs)
            return Matrix(place, bias, None, row, outs, 0, w.format_id, int8)
        form = ENUMS["Format"]["BY_INPUT" if self.transposed else "FLOAT32"]
        return Matrix(address(w[expert_id], strided_rows=True), bias, None, w.stride(1) * 4, outs, 0, form, 0)


class GroupedGemm:
    """Multiplies rows with the matrices of experts, of which each has one of every kind in ``weights``, in one loop."""

    def __init__(self, kernels: Kernels, weights: Sequence[ExpertWeights]) -> None:
        count, self._outs, _ = weights[0].shape
        if any(each.shape != weights[0].shape for each in weights):
            raise ValueError("the matrices of an expert that get the same rows have one shape")
        self._weights = tuple(weights)  # keeps their memory
        self._table = (Matrix * (count * len(weights)))(
            *(each.expert_struct(e) for e in range(count) for each in weights)
        )
        self._call = kernels.call

    def __call__(self, x: torch.Tensor, expert_ids: Sequence[int], offsets: Sequence[int]) -> torch.Tensor:
        """Rows x (rows, in) times the matrices of their experts -> (kinds, rows, out).

        Args:
            expert_ids: numbers of experts.
            offsets: one more number: rows [starts[i], starts[i + 1]) of x are those of expert i, at least one.
        """
        x, kinds, groups = x.contiguous(), len(self._weights), len(expert_ids)
        out = torch.empty(kinds, x.shape[0], self._outs, **CPU_FLOAT32)
        numbers, places = (Int64 * groups)(*expert_ids), (Int64 * (groups + 1))(*offsets)
        self._call("experts", address(x), x.shape[1], self._table, kinds, numbers, places, groups, address(out))
        return out
