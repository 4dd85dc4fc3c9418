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
_TOGETHER = 4096


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
    def number(self) -> int:
        """Of the format, for the kernels."""
        return 1 + list(FORMATS).index(self.format)


def quantised(weights: torch.Tensor) -> Stored:
    """A matrix (out, in) in Q8_0: blocks of 32 whole numbers from -127 to 127, times a scale in float16.

    Raises:
        ValueError: ``in`` is no multiple of 32.
    """
    block, size = FORMATS["Q8_0"]
    if weights.shape[1] % block:
        raise ValueError(f"Q8_0 has blocks of {block} weights, got rows of {weights.shape[1]}")
    data = torch.empty(weights.shape[0], weights.shape[1] // block * size, dtype=torch.uint8)
    # Some rows at a time: a head is large, and so is what is computed on the way.
    for rows, into in zip(weights.detach().split(_TOGETHER), data.split(_TOGETHER), strict=True):
        into.copy_(_q8_0(rows.float(), block))
    return Stored(data, "Q8_0")


def _q8_0(weights: torch.Tensor, block: int) -> torch.Tensor:
    blocks = weights.reshape(weights.shape[0], -1, block)
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    numbers = blocks * torch.where(scales > 0, 1 / scales, 0)
    # To the nearest, halves away from zero.
    whole = numbers.abs().trunc()
    whole = torch.copysign(whole + (numbers.abs() - whole >= 0.5), numbers).to(torch.int8)
    return torch.cat([scales.half().view(torch.uint8), whole.view(torch.uint8)], dim=-1).flatten(1)
