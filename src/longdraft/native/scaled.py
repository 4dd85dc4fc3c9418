"""Rows of keys or values in eight bits: integers, and a scale for each row."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from longdraft.native.header import ENUMS

# The dtypes of keys and values that kernels read, and their numbers.
FORMATS = {getattr(torch, name.lower()): number for name, number in ENUMS["Kept"].items()}


class Scaled:
    """Takes the place of a tensor (..., rows, d), which can be indexed and assigned to; the last dimension by a slice.

    A row is divided by its scale, the largest magnitude / 127, and rounded. A part of a row has the whole row's scale.

    Args:
        numbers: (..., rows, d) int8.
        scales: (..., rows) float32.
    """

    dtype = torch.int8

    def __init__(self, numbers: torch.Tensor, scales: torch.Tensor) -> None:
        self.numbers, self.scales = numbers, scales
        self.shape, self.device, self.stride = numbers.shape, numbers.device, numbers.stride

    @classmethod
    def of(cls, x: torch.Tensor) -> Scaled:
        """Rounds float rows. A row that is not finite gets a scale that is not finite."""
        x = x.float()
        # A tensor, as torch multiplies by the inverse of a number on a GPU.
        scales = x.abs().amax(-1) / torch.full((), 127.0, dtype=torch.float32, device=x.device)
        least = torch.finfo(torch.float32).tiny  # for rows of zeros
        return cls((x / scales.clamp_min(least)[..., None]).round_().to(torch.int8), scales)

    def __getitem__(self, index: Any) -> Scaled:
        return Scaled(self.numbers[index], self.scales[self._of_rows(index)])

    def __setitem__(self, index: Any, rows: torch.Tensor | Scaled) -> None:
        new = rows if isinstance(rows, Scaled) else Scaled.of(rows)
        self.numbers[index], self.scales[self._of_rows(index)] = new.numbers, new.scales

    def _of_rows(self, index: Any) -> Any:
        """An index without that of the last dimension."""
        return index[:-1] if isinstance(index, tuple) and len(index) == self.numbers.ndim else index

    def index_select(self, dim: int, index: torch.Tensor) -> Scaled:
        """``dim`` counts from the front, and is not the last one."""
        return Scaled(self.numbers.index_select(dim, index), self.scales.index_select(dim, index))

    def transpose(self, first: int, second: int) -> Scaled:
        """Both count from the front, and neither is the last one."""
        return Scaled(self.numbers.transpose(first, second), self.scales.transpose(first, second))

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()

    def zero_(self) -> Scaled:
        self.numbers.zero_()
        self.scales.zero_()
        return self

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        """The rows as floats."""
        return (self.numbers * self.scales[..., None]).to(dtype)


KeptRows: TypeAlias = torch.Tensor | Scaled
