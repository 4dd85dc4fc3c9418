"""Weights as they are stored in a file, which the kernels read as they are: see stored.h."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# The formats in stored.h's order, counted from 1: the name (GGUF's, or torch's), weights and bytes of a block.
FORMATS = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "BF16": (32, 64),
    "F16": (32, 64),
}


@dataclass(frozen=True)
class Stored:
    """A matrix (out, in) whose rows are blocks.

    Attributes:
        data: (out, bytes of a row) uint8 on the CPU, rows contiguous; it may lie in a mapped file.
        format: one of :data:`FORMATS`.

    Raises:
        ValueError: rows that are no whole blocks, or a format that is not served.
    """

    data: torch.Tensor
    format: str

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"weights are stored as one of {', '.join(FORMATS)}, got {self.format}")
        if self.data.dtype != torch.uint8 or self.data.dim() != 2 or self.data.stride(1) != 1:
            raise ValueError(f"stored weights are rows of bytes, got {self.data.dtype} {tuple(self.data.shape)}")
        if self.data.shape[1] % FORMATS[self.format][1]:
            raise ValueError(f"a row of {self.data.shape[1]} bytes is no whole number of {self.format} blocks")

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        weights, size = FORMATS[self.format]
        return self.data.shape[0], self.data.shape[1] // size * weights

    @property
    def device(self) -> torch.device:
        return self.data.device

    def rows(self, which: torch.Tensor) -> Stored:
        """Some of its rows."""
        return Stored(self.data[which], self.format)

    @property
    def number(self) -> int:
        """Of the format, for the kernels."""
        return 1 + list(FORMATS).index(self.format)
