"""Rows of keys or values in eight bits: integers, and a scale for each row."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from longdraft.native.header import ENUMS

# The dtypes of keys and values that kernels read, and their numbers.
KV_DTYPE_IDS = {getattr(torch, name.lower()): number for name, number in ENUMS["Kept"].items()}


class Int8KV:
    """Takes the place of a tensor (..., rows, d), which can be indexed and assigned to; the last dimension by a slice.

    A row is divided by its scale, the largest magnitude / 127, and rounded. A part of a row has the whole row's scale.

    Args:
        numbers: (..., rows, d) int8.
        scales: (..., rows) float32.
    """

    dtype = torch.int8

    def __init__(self, quants: torch.Tensor, scales: torch.Tensor) -> None:
        self.quants, self.scales = quants, scales
        self.shape, self.device, self.stride = quants.shape, quants.device, quants.stride

    @classmethod
    def quantize(cls, x: torch.Tensor) -> Int8KV:
        """Rounds float rows. A row that is not finite gets a scale that is not finite."""
        x = x.float()
        # A tensor, as torch multiplies by the inverse of a number on a GPU.
        scales = x.abs().amax(-1) / torch.full((), 127.0, dtype=torch.float32, device=x.device)
        least = torch.finfo(torch.float32).tiny  # for rows of zeros
        return cls((x / scales.clamp_min(least)[..., None]).round_().to(torch.int8), scales)

    def __getitem__(self, index: Any) -> Int8KV:
        return Int8KV(self.quants[index], self.scales[self._of_rows(index)])

    def __setitem__(self, index: Any, rows: torch.Tensor | Int8KV) -> None:
        new = rows if isinstance(rows, Int8KV) else Int8KV.quantize(rows)
        self.quants[index], self.scales[self._of_rows(index)] = new.quants, new.scales

    def _of_rows(self, index: Any) -> Any:
        """An index without that of the last dimension."""
        return index[:-1] if isinstance(index, tuple) and len(index) == self.quants.ndim else index

    def index_select(self, dim: int, index: torch.Tensor) -> Int8KV:
        """``dim`` counts from the front, and is not the last one."""
        return Int8KV(self.quants.index_select(dim, index), self.scales.index_select(dim, index))

    def transpose(self, first: int, second: int) -> Int8KV:
        """Both count from the front, and neither is the last one."""
        return Int8KV(self.quants.transpose(first, second), self.scales.transpose(first, second))

    def data_ptr(self) -> int:
        return self.quants.data_ptr()

    def zero_(self) -> Int8KV:
        self.quants.zero_()
        self.scales.zero_()
        return self

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        """The rows as floats."""
        return (self.quants * self.scales[..., None]).to(dtype)


KVTensor: TypeAlias = torch.Tensor | Int8KV
