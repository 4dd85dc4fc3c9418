"""Linear layers with quantised weights on a GPU: the blocks of a GGUF file, sorted into planes that one kernel reads.

A weight in a file is d * s * q - e * m: an integer q of 4 to 8 bits, a scale s and a minimum m of each group of 16 or
32 weights, and floats d and e of each block. The planes hold these numbers as they are, so a weight has the value that
it has on a CPU. The kernel (:mod:`longdraft.model.gpu.planes_kernel`) rounds weights to the inputs' dtype, and sums in
float32. For many tokens the matrix is dequantised, and torch multiplies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from longdraft.attention import custom_ops
from longdraft.attention.transfer import to_device
from longdraft.native.boundary import CPU_FLOAT32
from longdraft.native.quantized_matrix import QUANT_SIZES, QuantizedMatrix

logger = logging.getLogger("longdraft")

# The kernel reads the matrix once for each 64 tokens; beyond, one dequantised copy is cheaper.
MAX_KERNEL_ROWS = 128
# Rows of a matrix that are dequantised at a time, in float32: heads have some 150,000.
DEQUANTIZED_ROWS = 32_768
_matching: dict[tuple[object, ...], bool] = {}  # kind of planes on a device -> whether the kernel computes them right


@dataclass(frozen=True)
class Planes:
    """The numbers of a matrix (out, in), in tensors whose rows are the matrix's.

    Attributes:
        quants: uint8 (out, in / 2), two weights of 4 bits in a byte; or int8 (out, in).
        block_scales: d and, if there are minima, e: (out, blocks, 1 or 2), float16 as int16, which no cast changes.
        group_scales: s and, if there are minima, m: (out, groups, 1 or 2) int8; None: d is the scale, without minima.
        interleave: n, where byte i of n bytes holds weights i (low bits) and i + n of 2 n weights; 0 for int8 quants.
        zero: the integer that stands for 0.
    """

    quants: torch.Tensor
    block_scales: torch.Tensor
    group_scales: torch.Tensor | None
    interleave: int
    zero: int

    @property
    def shape(self) -> tuple[int, int]:
        rows, size = self.quants.shape
        return rows, size * 2 if self.interleave else size

    @property
    def device(self) -> torch.device:
        return self.quants.device

    def select_rows(self, rows: torch.Tensor | slice) -> Planes:
        """Returns the planes of some of the matrix's rows."""
        groups = None if self.group_scales is None else self.group_scales[rows]
        return Planes(self.quants[rows], self.block_scales[rows], groups, self.interleave, self.zero)


def planes_linear(
    x: torch.Tensor,
    quants: torch.Tensor,
    block_scales: torch.Tensor,
    group_scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    interleave: int,
    zero: int,
) -> torch.Tensor:
    """Computes x (rows, in) -> (rows, out) in x's dtype, with the fields of :class:`Planes` and a bias (out,)."""
    weights = dequantize(Planes(quants, block_scales, group_scales, interleave, zero))
    return F.linear(x, weights.to(x.dtype), bias)


custom_ops.define_op(planes_linear, "longdraft.model.gpu.planes_kernel")


def dequantize(planes: Planes) -> torch.Tensor:
    """Returns the matrix in float32, with the bits of ggml's own functions."""
    out, quants = len(planes.quants), planes.quants
    if planes.interleave:
        packed = quants.view(out, -1, 1, planes.interleave)
        quants = torch.cat([packed & 15, packed >> 4], dim=2)
    scales = planes.block_scales.view(torch.float16).float()
    if planes.group_scales is not None:
        num_groups = planes.group_scales.shape[1]
        scales = scales.repeat_interleave(num_groups // scales.shape[1], dim=1) * planes.group_scales.float()
    weights = (quants.reshape(out, scales.shape[1], -1).float() - planes.zero) * scales[..., :1]
    return (weights - scales[..., 1:] if scales.shape[2] == 2 else weights).flatten(1)


class PlanesLinear(nn.Module):
    """``nn.Linear`` with the planes of a matrix (out, in) and a float bias (out,)."""

    quants: torch.Tensor
    block_scales: torch.Tensor
    group_scales: torch.Tensor | None

    def __init__(self, planes: Planes, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = planes.shape
        self.interleave, self.zero = planes.interleave, planes.zero
        for name in ("quants", "block_scales", "group_scales"):
            self.register_buffer(name, getattr(planes, name), persistent=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def planes(self) -> Planes:
        return Planes(self.quants, self.block_scales, self.group_scales, self.interleave, self.zero)

    @property
    def weight(self) -> torch.Tensor:
        """The matrix in float32, dequantised at each access."""
        return dequantize(self.planes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes x (..., in) -> (..., out), in x's dtype."""
        rows = x.reshape(-1, self.in_features)
        if not uses_kernel(rows, self):
            products = []
            for start in range(0, self.out_features, DEQUANTIZED_ROWS):
                piece = slice(start, start + DEQUANTIZED_ROWS)
                weights = dequantize(self.planes.select_rows(piece)).to(x.dtype)
                products.append(F.linear(x, weights, None if self.bias is None else self.bias[piece]))
            return products[0] if len(products) == 1 else torch.cat(products, dim=-1)
        planes = self.quants, self.block_scales, self.group_scales, self.bias, self.interleave, self.zero
        out: torch.Tensor = torch.ops.longdraft.planes_linear(rows, *planes)
        return out.view(*x.shape[:-1], self.out_features)


def uses_kernel(rows: torch.Tensor, layer: PlanesLinear) -> bool:
    """True if the Triton kernel computes inputs ``rows`` (rows, in): few, in 16 bits, on a GPU where it is right."""
    if rows.device.type != "cuda" or rows.element_size() != 2 or len(rows) > MAX_KERNEL_ROWS:
        return False
    if not custom_ops.triton_enabled():
        return False
    planes = layer.planes
    key = rows.device, rows.dtype, planes.interleave, planes.block_scales.shape[1:], planes.group_scales is None
    if key not in _matching:
        _matching[key] = _kernel_matches(rows.device, rows.dtype, layer)
    return _matching[key]


def _kernel_matches(device: torch.device, dtype: torch.dtype, layer: PlanesLinear) -> bool:
    """True if the kernel agrees with the reference on the first outputs of a layer. Waits for the device."""
    planes = layer.planes
    groups = None if planes.group_scales is None else planes.group_scales[:64]
    tensors = planes.quants[:64], planes.block_scales[:64], groups, None
    numbers = torch.randn((3, layer.in_features), generator=torch.Generator().manual_seed(0), **CPU_FLOAT32)
    x = to_device(numbers, device, dtype)
    reason = custom_ops.mismatch_reason(planes_linear, (x, *tensors, planes.interleave, planes.zero))
    if reason is not None:
        logger.warning("Quantised layers are dequantised for each forward, not read by one kernel: %s.", reason)
    return reason is None


def _split(blocks: torch.Tensor, *sizes: int) -> tuple[torch.Tensor, ...]:
    return blocks.split(sizes, dim=-1)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(1).contiguous()


def _halves(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16)


def _q4_0(blocks: torch.Tensor) -> Planes:
    scales, quants = _split(blocks, 2, 16)
    return Planes(_rows(quants), _halves(scales), None, interleave=16, zero=8)


def _q8_0(blocks: torch.Tensor) -> Planes:
    scales, quants = _split(blocks, 2, 32)
    return Planes(_rows(quants).view(torch.int8), _halves(scales), None, interleave=0, zero=0)


def _six_bit_scales(packed: torch.Tensor) -> torch.Tensor:
    """Unpacks scales and minima of the eight groups of a Q4_K or Q5_K block, (..., 12) -> (..., 8, 2)."""
    first, second, third = _split(packed, 4, 4, 4)
    scales = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], dim=-1)
    minima = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], dim=-1)
    return torch.stack([scales, minima], dim=-1).view(torch.int8)


def _q4_k(blocks: torch.Tensor) -> Planes:
    scales, packed, quants = _split(blocks, 4, 12, 128)
    return Planes(_rows(quants), _halves(scales), _six_bit_scales(packed).flatten(1, 2), interleave=32, zero=0)


def _q5_k(blocks: torch.Tensor) -> Planes:
    scales, packed, high, low = _split(blocks, 4, 12, 32, 128)
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    nibbles = low.unflatten(-1, (4, 1, 32))
    quants = torch.cat([nibbles & 15, nibbles >> 4], dim=-2).flatten(-3, -2) | ((high[..., None, :] >> shifts & 1) << 4)
    six_bit = _six_bit_scales(packed).flatten(1, 2)
    return Planes(_rows(quants).view(torch.int8), _halves(scales), six_bit, interleave=0, zero=0)


def _q6_k(blocks: torch.Tensor) -> Planes:
    low, high, group_scales, scales = _split(blocks, 128, 64, 16, 2)
    nibbles, shifts = low.unflatten(-1, (2, 1, 64)), torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    low_bits = torch.cat([nibbles & 15, nibbles >> 4], dim=-2).flatten(-2)  # (..., 2, 128)
    high_bits = (high.unflatten(-1, (2, 1, 32)) >> shifts[:, None] & 3).flatten(-2)
    quants = (low_bits | high_bits << 4).view(torch.int8) - 32
    group_scales = _rows(group_scales).view(torch.int8)[..., None]
    return Planes(_rows(quants), _halves(scales), group_scales, interleave=0, zero=0)


_SPLITTERS: dict[str, Callable[[torch.Tensor], Planes]] = {
    "Q4_0": _q4_0, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip


def planes_of(matrix: QuantizedMatrix) -> Planes | None:
    """Sorts a matrix's blocks into planes; None for other formats."""
    splitter = _SPLITTERS.get(matrix.format)
    if splitter is None:
        return None
    return splitter(matrix.data.contiguous().unflatten(1, (-1, QUANT_SIZES[matrix.format][1])))
