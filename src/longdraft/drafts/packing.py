"""Packs a draft's matrices into 8 or 4 bits, as they are stored in ``model.safetensors``.

A packed matrix (out, in) is two tensors:

    NAME         8 bits: int8 (out, in), numbers from -127 to 127
                 4 bits: uint8 (out, in / 2), numbers from 0 to 15 that stand for -8 to 7; the lower half of byte i is
                 column 2i, the upper half column 2i + 1
    NAME.scales  8 bits: float32 (out, 1), a scale for each row
                 4 bits: float16 (out, in / 32), a scale for each 32 columns of a row

A weight is its number times its scale. On a CPU, packing in 8 bits costs no acceptance, because our kernels round the
weights of drafts to 8 bits anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from longdraft.errors import CheckpointError
from longdraft.native.boundary import CPU_FLOAT32

SCALES = ".scales"
BITS = (8, 4)
QUANT_BLOCK = 32  # columns that share a 4-bit scale
# Candidate scales of a 4-bit block, relative to the scale that represents the block's largest weight exactly: in steps
# of 0.025, because a smaller or larger scale may round the other weights better.
_SCALE_FACTORS = torch.linspace(0.75, 1.2, 19, **CPU_FLOAT32)


def pack(tensors: Mapping[str, torch.Tensor], bits: int) -> dict[str, torch.Tensor]:
    """Packs a draft's matrices. Norms, biases, slot embeddings and the vocabulary table stay as they are.

    ``bits`` is 8 or 4; with 4, a matrix whose number of columns is no multiple of 32 still takes 8 bits.
    """
    if bits not in BITS:
        raise ValueError(f"bits must be 8 or 4, got {bits}")
    packed = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and name.endswith("weight") and tensor.is_floating_point():
            pack_matrix = _pack4 if bits == 4 and tensor.shape[1] % QUANT_BLOCK == 0 else _pack8
            packed[name], packed[name + SCALES] = pack_matrix(tensor.float())
    return packed


def unpack(tensors: Mapping[str, torch.Tensor], folder: Path | str) -> dict[str, torch.Tensor]:
    """Unpacks a draft's matrices to float32. Other tensors stay as they are.
    Raises CheckpointError if numbers or scales are missing, of a wrong shape or dtype, or not finite."""
    unpacked = {name: t for name, t in tensors.items() if not name.endswith(SCALES)}
    scales = {name.removesuffix(SCALES): t for name, t in tensors.items() if name.endswith(SCALES)}
    integers = {name for name, t in unpacked.items() if t.dtype in (torch.int8, torch.uint8)}
    if lone := sorted(integers ^ set(scales)):
        raise _damaged(folder, f"{lone[0]} has {'no scales' if lone[0] in integers else 'scales without numbers'}")
    for name, row_scales in scales.items():
        numbers = unpacked[name]
        is_8bit, num_rows = numbers.dtype == torch.int8, len(numbers)
        num_columns = numbers.shape[-1] if is_8bit else 2 * numbers.shape[-1]  # two 4-bit numbers share a byte
        shape = (num_rows, 1) if is_8bit else (num_rows, num_columns // QUANT_BLOCK)
        fits = numbers.dim() == 2 and (is_8bit or num_columns % QUANT_BLOCK == 0)
        if not fits or row_scales.shape != shape or row_scales.dtype != (torch.float32 if is_8bit else torch.float16):
            raise _damaged(folder, f"{name} and its scales do not belong together")
        if not bool(row_scales.isfinite().all()):
            raise _damaged(folder, f"{name} has scales that are not finite")
        unpacked[name] = numbers * row_scales if is_8bit else _unpack4(numbers, row_scales)
    return unpacked


def _pack8(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = weights.abs().amax(1, keepdim=True) / 127
    return (weights / torch.where(scales > 0, scales, 1)).round().to(torch.int8), scales


def _pack4(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packs each block with the candidate scale that has the smallest squared error. The weight of largest magnitude
    becomes -8 or a number near -8, because -8 has no positive counterpart."""
    blocks = weights.unflatten(1, (-1, QUANT_BLOCK))
    largest = blocks.gather(2, blocks.abs().argmax(2, keepdim=True))
    best_error = torch.full_like(largest, torch.inf)
    numbers, scales = torch.zeros_like(blocks), torch.zeros_like(largest)
    for factor in _SCALE_FACTORS:
        scale = (largest / -8 * factor).half().float()
        candidate = (blocks / torch.where(scale == 0, 1, scale)).round().clamp(-8, 7)
        error = (candidate * scale - blocks).square().sum(2, keepdim=True)
        better = error < best_error
        best_error, scales = torch.where(better, error, best_error), torch.where(better, scale, scales)
        numbers = torch.where(better, candidate, numbers)
    nibbles = (numbers + 8).to(torch.uint8).flatten(1).unflatten(1, (-1, 2))
    return nibbles[..., 0] | nibbles[..., 1] << 4, scales[..., 0].half()


def _unpack4(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    unpacked = torch.stack([numbers & 15, numbers >> 4], 2).flatten(1).float() - 8
    return (unpacked.unflatten(1, (-1, QUANT_BLOCK)) * scales.float()[..., None]).flatten(1)


def _damaged(folder: Path | str, problem: str) -> CheckpointError:
    return CheckpointError(f"model.safetensors of {folder} is damaged: {problem}. Copy the draft again.")
