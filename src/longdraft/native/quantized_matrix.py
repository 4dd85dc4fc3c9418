"""Weights in the format of their file, which the kernels read without unpacking them first: see formats.h."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from longdraft.native.boundary import CPU_FLOAT32, address
from longdraft.native.header import ENUMS

# GGUF's name of a format -> weights and bytes of a block.
QUANT_SIZES = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
    "BF16": (32, 64), "F16": (32, 64), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q2_K": (256, 84), "Q3_K": (256, 110),
    "IQ4_NL": (32, 18), "IQ4_XS": (256, 136), "MXFP4": (32, 17),
}  # fmt: skip
# Formats without blocks.
HALF_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix (out, in) whose rows consist of blocks.

    Attributes:
        data: (out, bytes of a row) uint8 with contiguous rows, possibly a mapped file. The kernels need it on the CPU.
        format: one of :data:`QUANT_SIZES`.
        int8: use int8 arithmetic: rows that are multiplied with the matrix are rounded to eight bits
            (:func:`fake_quantize_int8`). Not for bfloat16 and float16.
        woven: the same bytes as int8 arithmetic reads them fastest (:meth:`Kernels.weave`), (groups, lanes, bytes of a
            row); None if they were not laid out.

    Raises:
        ValueError: a row is not a whole number of blocks, or the format is unknown.
    """

    data: torch.Tensor
    format: str
    int8: bool = False
    repacked: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.format not in QUANT_SIZES:
            raise ValueError(f"weights are stored as one of {', '.join(QUANT_SIZES)}, got {self.format}")
        if self.data.dtype != torch.uint8 or self.data.dim() != 2 or self.data.stride(1) != 1:
            raise ValueError(f"stored weights are rows of bytes, got {self.data.dtype} {tuple(self.data.shape)}")
        if self.data.shape[1] % QUANT_SIZES[self.format][1]:
            raise ValueError(f"a row of {self.data.shape[1]} bytes is no whole number of {self.format} blocks")
        if self.int8 and self.format in HALF_DTYPES:
            raise ValueError(f"int8 arithmetic is for blocks of 8 bits or fewer, not for {self.format}")

    @property
    def is_quantized(self) -> bool:
        """True if weights are stored in 8 bits or fewer, so that int8 arithmetic is possible."""
        return self.format not in HALF_DTYPES

    @property
    def bits_per_weight(self) -> float:
        """Bits of a weight, scales included."""
        weights, size = QUANT_SIZES[self.format]
        return 8 * size / weights

    def with_int8(self, int8: bool) -> QuantizedMatrix:
        """The same weights with int8 arithmetic, if they are stored in blocks, or with float32 arithmetic."""
        return QuantizedMatrix(self.data, self.format, int8 and self.is_quantized, self.repacked)

    @classmethod
    def from_half(cls, weight: torch.Tensor) -> QuantizedMatrix:
        """A view of a bfloat16 or float16 matrix whose in-features are a multiple of 32."""
        return cls(weight.detach().view(torch.uint8), "BF16" if weight.dtype == torch.bfloat16 else "F16")

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        weights, size = QUANT_SIZES[self.format]
        return self.data.shape[0], self.data.shape[1] // size * weights

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def format_id(self) -> int:
        """The format's number for the kernels."""
        return ENUMS["Format"][self.format]

    def kernel_address(self, first_row: int = 0) -> tuple[int | None, int, int]:
        """Where the kernels find the rows from number ``first_row`` on: an address, the bytes of a row, and whether int8
        arithmetic reads them there: 0, 1, or the lanes that they are woven for."""
        if not self.int8 or self.repacked is None:
            return address(self.data[first_row:], torch.uint8, strided_rows=True), self.data.stride(0), int(self.int8)
        lanes, size = self.repacked.shape[1:]
        return address(self.repacked[first_row // lanes :], torch.uint8, strided_rows=True), size, lanes

    def select_rows(self, ids: torch.Tensor) -> QuantizedMatrix:
        """The rows with the given ids (n,)."""
        return QuantizedMatrix(self.data[ids], self.format, self.int8)

    def dequantize(self) -> torch.Tensor:
        """The weights as float32 (out, in), unpacked by gguf: the reference of the kernels, and used without them."""
        data = self.data.contiguous()
        if (half := HALF_DTYPES.get(self.format)) is not None:
            return data.view(half).float()
        import gguf

        found = gguf.dequantize(data.cpu().numpy(), gguf.GGMLQuantizationType[self.format])
        return torch.from_numpy(found).view(self.shape).to(data.device)


def fake_quantize_int8(x: torch.Tensor, format: str) -> torch.Tensor:
    """Rounds rows (..., in) as int8 arithmetic does before weights of a kind in :data:`QUANT_SIZES`: each 32 numbers to
    multiples of their largest / 127; each 128 where weights come in blocks of 256, but for Q2_K's.

    This is the reference of ``int8.cpp``, in torch's operations.
    """
    blocks = x.float().unflatten(-1, (-1, 128 if QUANT_SIZES[format][0] == 256 and format != "Q2_K" else 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    # Infinite for a block of tiny numbers; 127 / x is not a division in torch.
    factor = torch.tensor(127.0, **CPU_FLOAT32) / largest
    steps = torch.where(factor.isfinite(), blocks * factor, 0.0).round()
    return (steps * (largest / 127)).flatten(-2)


def quantize_blocks(rows: torch.Tensor, format: Literal["Q8_0", "Q4_0"]) -> torch.Tensor:
    """Rows (n, in) of floats -> bytes of blocks: numbers of eight or four bits, and a scale for each 32."""
    blocks = rows.float().unflatten(1, (-1, 32))
    largest = blocks.gather(2, blocks.abs().argmax(2, keepdim=True))
    scales = largest.abs() / 127 if format == "Q8_0" else largest / -8
    numbers = blocks / torch.where(scales == 0, 1, scales)
    if format == "Q8_0":
        packed = numbers.round().to(torch.int8).view(torch.uint8)
    else:
        whole = (numbers + 8.5).clamp_(0, 15).to(torch.uint8)
        packed = whole[..., :16] | whole[..., 16:] << 4
    return torch.cat([scales.half().view(torch.uint8), packed], 2).flatten(1)
