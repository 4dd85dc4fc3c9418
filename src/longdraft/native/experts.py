"""Grouped GEMM for mixture-of-experts layers (matmul.cpp)."""

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
    """The weights of one projection, such as gate, for all experts of a layer.

    Attributes:
        weight: (num_experts, out, in) float32 with contiguous rows, or quantized (num_experts * out, in).
        bias: (num_experts, out) float32, or None.
        transposed: True: the float32 weight is (num_experts, in, out).
        num_experts: number of experts; only needed for a quantized weight.
    """

    weight: torch.Tensor | QuantizedMatrix
    bias: torch.Tensor | None = None
    transposed: bool = False
    num_experts: int = 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """(num_experts, out, in)."""
        if isinstance(self.weight, QuantizedMatrix):
            rows, in_features = self.weight.shape
            return self.num_experts, rows // self.num_experts, in_features
        num_experts, rows, columns = self.weight.shape
        return (num_experts, columns, rows) if self.transposed else (num_experts, rows, columns)

    def expert_struct(self, expert_id: int) -> ctypes.Structure:
        """Returns the structure Matrix of one expert; its field y (memory for outputs) is null."""
        w, out_features = self.weight, self.shape[1]
        bias = None if self.bias is None else address(self.bias[expert_id], min_numel=out_features)
        if isinstance(w, QuantizedMatrix):
            data, stride, int8_layout = w.kernel_address(expert_id * out_features)
            format_id = w.format_id
        else:
            data, stride, int8_layout = address(w[expert_id], strided_rows=True), w.stride(1) * w.itemsize, 0
            format_id = ENUMS["Format"]["FLOAT32_TRANSPOSED" if self.transposed else "FLOAT32"]
        return Matrix(w=data, bias=bias, w_stride=stride, n_out=out_features, format=format_id, int8_layout=int8_layout)


class GroupedGemm:
    """Multiplies each group of rows with its expert's matrices: one from each of ``weights``, which have one shape."""

    def __init__(self, kernels: Kernels, weights: Sequence[ExpertWeights]) -> None:
        num_experts, self._out_features, _ = weights[0].shape
        if any(w.shape != weights[0].shape for w in weights):
            raise ValueError("all matrices of a grouped GEMM must have one shape")
        self._weights = tuple(weights)  # keeps the memory alive
        structs = [w.expert_struct(e) for e in range(num_experts) for w in weights]
        self._matrices = (Matrix * len(structs))(*structs)
        self._call = kernels.call

    def __call__(self, x: torch.Tensor, expert_ids: Sequence[int], offsets: Sequence[int]) -> torch.Tensor:
        """Returns the products (len(weights), rows, out).

        Args:
            x: (rows, in).
            expert_ids: id of each group's expert.
            offsets: boundaries of the groups: group i is rows [offsets[i], offsets[i + 1]) of x, at least one row.
        """
        x, per_expert, num_groups = x.contiguous(), len(self._weights), len(expert_ids)
        out = torch.empty(per_expert, x.shape[0], self._out_features, **CPU_FLOAT32)
        ids, starts = (Int64 * num_groups)(*expert_ids), (Int64 * (num_groups + 1))(*offsets)
        experts = x.shape[1], self._matrices, per_expert, ids
        self._call("grouped_gemm", address(x), *experts, starts, num_groups, address(out))
        return out
