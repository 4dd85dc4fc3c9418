"""Matrices in four bits, for a target that drafts for itself: see nibbled.cpp. A draft need not be exact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from longdraft.native.boundary import FLOATS
from longdraft.native.rounded import BAND, TOGETHER, in_pieces
from longdraft.native.stored import Stored

BLOCK, _BYTES = 32, 20 * BAND


@dataclass(frozen=True)
class Nibbled:
    """A matrix (out, in) in blocks of 32 weights of a row. A weight is scale * number + least, with numbers 0 to 15.

    Attributes:
        data: (bands of 16 rows, bytes of a band) uint8, in the layout of rounded.h.
        shape: (out, in).
        number: the format's number for the kernels.
    """

    data: torch.Tensor
    shape: tuple[int, int]
    number = -2

    @classmethod
    def empty(cls, shape: tuple[int, ...]) -> Nibbled:
        """A matrix of this shape with uninitialised numbers."""
        outs, size = shape
        bands, blocks = (outs + BAND - 1) // BAND, (size + BLOCK - 1) // BLOCK
        return cls(torch.empty(bands, blocks * _BYTES, dtype=torch.uint8, device="cpu"), (outs, size))

    def pieces(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Groups of rows that are written together, each with its bands."""
        for at in range(0, self.shape[0], TOGETHER):
            yield slice(at, at + TOGETHER), self.data[at // BAND : (at + TOGETHER) // BAND]

    def floats(self) -> torch.Tensor:
        """The weights as float32 (out, in)."""
        outs, size = self.shape
        blocks = self.data.unflatten(1, (-1, _BYTES))
        both = blocks[..., : 16 * BAND].unflatten(2, (8, BAND, 2))  # (bands, blocks, fours, outputs, two inputs)
        numbers = torch.stack([both & 15, both >> 4], 3).permute(0, 4, 1, 2, 3, 5).flatten(2)
        ends = blocks[..., 16 * BAND :].contiguous().view(torch.bfloat16).float().unflatten(2, (2, BAND))
        scale, least = (x.transpose(1, 2).repeat_interleave(BLOCK, 2) for x in ends.unbind(2))
        return (numbers.float() * scale + least).flatten(0, 1)[:outs, :size]


def nibbled(weights: torch.Tensor | Stored) -> Nibbled:
    """Converts a matrix (out, in) to four bits. Each block's 16 values span its smallest to its largest weight."""
    matrix = Nibbled.empty(weights.shape)
    size, blocks = matrix.shape[1], matrix.data.shape[1] // _BYTES
    for rows, (_, bands) in zip(in_pieces(weights), matrix.pieces(), strict=True):
        filled = torch.zeros(len(bands) * BAND, blocks * BLOCK, **FLOATS)
        filled[: len(rows), :size] = rows
        each = filled.unflatten(1, (blocks, BLOCK))
        least = each.amin(2, keepdim=True).bfloat16()
        scale = ((each.amax(2, keepdim=True) - least.float()) / 15).bfloat16()
        steps = torch.where(scale > 0, scale.float(), 1.0)
        numbers = ((each - least.float()) / steps).round().clamp(0, 15).to(torch.uint8)
        # (bands, outputs, blocks, fours, first or second, two inputs) -> (bands, blocks, fours, outputs, two inputs)
        split = numbers.view(len(bands), BAND, blocks, 8, 2, 2)
        both = (split[..., 0, :] | split[..., 1, :] << 4).permute(0, 2, 3, 1, 4)
        parts = bands.view(len(bands), blocks, _BYTES)
        parts[..., : 16 * BAND] = both.flatten(2)
        ends = torch.stack([scale, least]).view(2, len(bands), BAND, blocks).permute(1, 3, 0, 2).contiguous()
        parts[..., 16 * BAND :] = ends.view(torch.uint8).flatten(2)
    return matrix
