"""Weight matrices in ggml's quant blocks or in 16-bit floats, which kernels read without conversion (quants.h)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from longdraft.native.boundary import CPU_FLOAT32, address
from longdraft.native.header import ENUMS, QUANT_FORMATS

# Name of a format of 16-bit floats -> torch dtype.
HALF_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}
# Name of a format (a ggml type) -> (number of weights, number of bytes) in a block.
QUANT_SIZES = {name: (row.block_weights, row.block_bytes) for name, row in QUANT_FORMATS.items()}
QUANT_SIZES |= dict.fromkeys(HALF_DTYPES, (32, 64))


@dataclass(frozen=True)
class QuantizedMatrix:
    """A weight (out, in) whose rows consist of quant blocks.

    Attributes:
        data: (out, bytes of a row) uint8 with contiguous rows, often a mapped file. Kernels need it on the CPU.
        format: a name in :data:`QUANT_SIZES`.
        int8: True: activations are quantized to int8 too (:func:`fake_quantize_int8`). Not for bfloat16 and float16.
        repacked: None, or a copy with interleaved rows for int8 arithmetic (:meth:`Kernels.repack`):
            (out / lanes, lanes, bytes of a row), where groups of ``lanes`` rows are interleaved.

    Raises:
        ValueError: the format is unknown, or rows are not whole blocks.
    """

    data: torch.Tensor
    format: str
    int8: bool = False
    repacked: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.format not in QUANT_SIZES:
            raise ValueError(f"unknown format {self.format}: give one of {', '.join(QUANT_SIZES)}")
        if self.data.dtype != torch.uint8 or self.data.dim() != 2 or self.data.stride(1) != 1:
            raise ValueError(f"data must be uint8 (out, row bytes), got {self.data.dtype} {tuple(self.data.shape)}")
        if self.data.shape[1] % QUANT_SIZES[self.format][1]:
            raise ValueError(f"a row of {self.data.shape[1]} bytes is no whole number of {self.format} blocks")
        if self.int8 and self.format in HALF_DTYPES:
            raise ValueError(f"int8 arithmetic is for blocks of 8 bits or fewer, not for {self.format}")

    @property
    def is_quantized(self) -> bool:
        """True for formats of 8 bits or fewer, which int8 arithmetic needs; False for bfloat16 and float16."""
        return self.format not in HALF_DTYPES

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight, scales included."""
        num_weights, num_bytes = QUANT_SIZES[self.format]
        return 8 * num_bytes / num_weights

    def with_int8(self, int8: bool) -> QuantizedMatrix:
        """Returns a matrix of these weights for int8 arithmetic if ``int8``; 16-bit floats keep float32 arithmetic."""
        return QuantizedMatrix(self.data, self.format, int8 and self.is_quantized, self.repacked)

    @classmethod
    def from_half(cls, weight: torch.Tensor) -> QuantizedMatrix:
        """Wraps a bfloat16 or float16 matrix (out, in) without a copy; in must be a multiple of 32."""
        return cls(weight.detach().view(torch.uint8), "BF16" if weight.dtype == torch.bfloat16 else "F16")

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        num_weights, num_bytes = QUANT_SIZES[self.format]
        return self.data.shape[0], self.data.shape[1] // num_bytes * num_weights

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def format_id(self) -> int:
        """Number of the format in the enumeration Format of formats.h."""
        return ENUMS["Format"][self.format]

    def kernel_address(self, first_row: int = 0) -> tuple[int | None, int, int]:
        """Returns three fields of Matrix (kernels.h) for the rows from ``first_row`` on: w, w_stride, int8_layout."""
        if not self.int8 or self.repacked is None:
            return address(self.data[first_row:], torch.uint8, strided_rows=True), self.data.stride(0), int(self.int8)
        lanes, row_bytes = self.repacked.shape[1:]
        return address(self.repacked[first_row // lanes :], torch.uint8, strided_rows=True), row_bytes, lanes

    def select_rows(self, ids: torch.Tensor) -> QuantizedMatrix:
        """Returns a matrix of the rows whose indices are ``ids`` (n,)."""
        return QuantizedMatrix(self.data[ids], self.format, self.int8)

    def dequantize(self) -> torch.Tensor:
        """Returns float32 weights (out, in), computed by the package gguf. For CPUs without kernels, and for tests."""
        data = self.data.contiguous()
        if (dtype := HALF_DTYPES.get(self.format)) is not None:
            return data.view(dtype).float()
        import gguf

        floats = gguf.dequantize(data.cpu().numpy(), gguf.GGMLQuantizationType[self.format])
        return torch.from_numpy(floats).view(self.shape).to(data.device)


def fake_quantize_int8(x: torch.Tensor, format: str) -> torch.Tensor:
    """Quantizes activations (..., in) to int8, as kernels do for weights of a format, and dequantizes them. Tests
    compare quantize_rows.cpp with this function."""
    blocks = x.float().unflatten(-1, (-1, QUANT_FORMATS[format].act_weights))  # of numbers that share a scale
    largest = blocks.abs().amax(-1, keepdim=True)
    # The dividend is a tensor, because torch computes 127 / x by a reciprocal.
    inverse_scale = torch.tensor(127.0, **CPU_FLOAT32) / largest
    quants = torch.where(inverse_scale.isfinite(), blocks * inverse_scale, 0.0).round()  # infinite for tiny numbers
    return (quants * (largest / 127)).flatten(-2)


def quantize_blocks(rows: torch.Tensor, format: Literal["Q8_0", "Q4_0"]) -> torch.Tensor:
    """Quantizes floats (n, in) as ggml does; returns the bytes of the blocks (n, bytes of a row) uint8."""
    blocks = rows.float().unflatten(1, (-1, 32))
    highest, lowest = blocks.amax(2, keepdim=True), blocks.amin(2, keepdim=True)
    largest = torch.where(highest > -lowest, highest, lowest)
    # Of two numbers of one magnitude ggml takes the first.
    ties = (highest == -lowest).squeeze(2)
    tied = blocks[ties]
    largest[ties] = tied.gather(1, tied.abs().argmax(1, keepdim=True))
    scales = largest.abs() / 127 if format == "Q8_0" else largest / -8
    quants = blocks / torch.where(scales == 0, 1, scales)
    if format == "Q8_0":
        packed = quants.round().to(torch.int8).view(torch.uint8)
    else:
        nibbles = (quants + 8.5).clamp_(0, 15).to(torch.uint8)  # the zero point 8; 0.5 rounds to the nearest code
        packed = nibbles[..., :16] | nibbles[..., 16:] << 4
    return torch.cat([scales.half().view(torch.uint8), packed], 2).flatten(1)
