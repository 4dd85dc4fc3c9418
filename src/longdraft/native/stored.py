"""Weights as they are stored in a file, which the kernels read as they are: see stored.h."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from longdraft.native.dequantise import FORMATS

# Formats that are no blocks.
HALVES = ("BF16", "F16")


@dataclass(frozen=True)
class Stored:
    """A matrix (out, in) whose rows are blocks.

    Attributes:
        data: (out, bytes of a row) uint8, rows contiguous; it may lie in a mapped file. The kernels take it on the CPU.
        format: one of :data:`FORMATS`.
        int8: products are in int8 arithmetic: rows that meet the matrix are rounded to eight bits in blocks of 32.
            Not of bfloat16 and float16.

    Raises:
        ValueError: rows that are no whole blocks, or a format that is not served.
    """

    data: torch.Tensor
    format: str
    int8: bool = False

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"weights are stored as one of {', '.join(FORMATS)}, got {self.format}")
        if self.data.dtype != torch.uint8 or self.data.dim() != 2 or self.data.stride(1) != 1:
            raise ValueError(f"stored weights are rows of bytes, got {self.data.dtype} {tuple(self.data.shape)}")
        if self.data.shape[1] % FORMATS[self.format][1]:
            raise ValueError(f"a row of {self.data.shape[1]} bytes is no whole number of {self.format} blocks")
        if self.int8 and self.format in HALVES:
            raise ValueError(f"int8 arithmetic is for blocks of 8 bits or fewer, not for {self.format}")

    @classmethod
    def of(cls, weight: torch.Tensor) -> Stored:
        """A bfloat16 or float16 matrix as it lies, in-features in multiples of 32."""
        return cls(weight.detach().view(torch.uint8), "BF16" if weight.dtype == torch.bfloat16 else "F16")

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        weights, size, _ = FORMATS[self.format]
        return self.data.shape[0], self.data.shape[1] // size * weights

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def number(self) -> int:
        """Of the format, for the kernels."""
        return 1 + list(FORMATS).index(self.format)

    def rows(self, ids: torch.Tensor) -> Stored:
        """Some of the rows. ids (n,)."""
        return Stored(self.data[ids], self.format, self.int8)

    def floats(self) -> torch.Tensor:
        """(out, in) float32: what it stands for, by torch's operations."""
        _, size, unpack = FORMATS[self.format]
        return unpack(self.data.reshape(-1, size)).view(self.shape)


def rounded_to_int8(x: torch.Tensor) -> torch.Tensor:
    """What int8 arithmetic makes of rows (..., in): each block of 32 numbers rounded to 255 steps of its largest / 127.

    The reference of ``int8.cpp``, by torch's operations.
    """
    blocks = x.float().unflatten(-1, (-1, 32))
    high = blocks.abs().amax(-1, keepdim=True)
    factor = torch.full_like(high, 127) / high  # 127 / high would be 127 * (1 / high), which rounds twice
    return ((blocks * torch.where(factor.isfinite(), factor, 0.0)).round() * (high / 127)).flatten(-2)
