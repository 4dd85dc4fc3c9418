"""Weights in the format of their file, which the kernels read without unpacking them first: see stored.h."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from longdraft.native.boundary import FLOATS
from longdraft.native.dequantise import FORMATS

# Formats without blocks.
HALVES = ("BF16", "F16")


@dataclass(frozen=True)
class Stored:
    """A matrix (out, in) whose rows consist of blocks.

    Attributes:
        data: (out, bytes of a row) uint8 with contiguous rows, possibly a mapped file. The kernels need it on the CPU.
        format: one of :data:`FORMATS`.
        int8: use int8 arithmetic: rows that are multiplied with the matrix are rounded to eight bits in blocks of 32.
            Not for bfloat16 and float16.

    Raises:
        ValueError: a row is not a whole number of blocks, or the format is unknown.
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

    @property
    def in_blocks(self) -> bool:
        """True if weights are stored in 8 bits or fewer, so that int8 arithmetic is possible."""
        return self.format not in HALVES

    @property
    def bits(self) -> float:
        """Bits of a weight, scales included."""
        weights, size, _ = FORMATS[self.format]
        return 8 * size / weights

    def computing(self, int8: bool) -> Stored:
        """The same weights with int8 arithmetic, if they are stored in blocks, or with float32 arithmetic."""
        return Stored(self.data, self.format, int8 and self.in_blocks)

    @classmethod
    def of(cls, weight: torch.Tensor) -> Stored:
        """A view of a bfloat16 or float16 matrix whose in-features are a multiple of 32."""
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
        """The format's number for the kernels."""
        return 1 + list(FORMATS).index(self.format)

    def rows(self, ids: torch.Tensor) -> Stored:
        """The rows with the given ids (n,)."""
        return Stored(self.data[ids], self.format, self.int8)

    def floats(self) -> torch.Tensor:
        """The weights as float32 (out, in), unpacked by torch's operations."""
        _, size, unpack = FORMATS[self.format]
        return unpack(self.data.reshape(-1, size)).view(self.shape)


def rounded_to_int8(x: torch.Tensor) -> torch.Tensor:
    """Rounds rows (..., in) as int8 arithmetic does: each block of 32 numbers to multiples of its largest / 127.

    This is the reference of ``int8.cpp``, in torch's operations.
    """
    blocks = x.float().unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    # Infinite for a block of tiny numbers; 127 / x is not a division in torch.
    factor = torch.tensor(127.0, **FLOATS) / largest
    steps = torch.where(factor.isfinite(), blocks * factor, 0.0).round()
    return (steps * (largest / 127)).flatten(-2)


def in_four_bits(matrix: Stored) -> Stored:
    """A matrix rounded to Q4_0: in blocks of 32, the largest of which becomes -8 times the scale."""
    pieces = []
    for rows in matrix.data.split(4096):
        blocks = Stored(rows, matrix.format).floats().unflatten(1, (-1, 32))
        largest = blocks.gather(2, blocks.abs().argmax(2, keepdim=True))
        scales = largest / -8
        numbers = (blocks / torch.where(scales == 0, 1, scales) + 8.5).clamp_(0, 15).to(torch.uint8)
        packed = numbers[..., :16] | numbers[..., 16:] << 4
        pieces.append(torch.cat([scales.half().view(torch.uint8), packed], 2).flatten(1))
    return Stored(torch.cat(pieces), "Q4_0", matrix.int8)
