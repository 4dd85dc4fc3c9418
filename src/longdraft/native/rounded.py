"""Matrices rounded to eight bits, for drafts: see rounded.cpp. A draft need not be exact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from longdraft.native.boundary import FLOATS
from longdraft.native.stored import Stored

BAND = 16  # rows of a band
_UNIT = 4  # rows are padded to a multiple of it
LONGEST = 16384  # weights of the longest row
TOGETHER = 4096  # rows that are rounded at a time, which bounds the memory for a large head


@dataclass(frozen=True)
class Rounded:
    """A matrix (out, in) of integers from -127 to 127, with a scale for each row.

    Attributes:
        data: (bands of 16 rows, bytes of a band) int8, in the layout of rounded.h: for every two columns the two
            numbers of each row, zeros up to a multiple of 4 columns, then the rows' scales, four bytes each.
        shape: (out, in).
        number: the format's number for the kernels.
    """

    data: torch.Tensor
    shape: tuple[int, int]
    number = -1

    def floats(self) -> torch.Tensor:
        """The weights as float32 (out, in)."""
        outs, size = self.shape
        numbers = self.data[:, : -4 * BAND].unflatten(1, (-1, BAND, 2)).transpose(1, 2).flatten(2).flatten(0, 1)
        scales = self.data[:, -4 * BAND :].contiguous().view(torch.float32).view(-1, 1)
        return numbers[:outs, :size].float() * scales[:outs]


def rounded(weights: torch.Tensor | Stored) -> Rounded:
    """Rounds each row of a matrix (out, in) to 255 levels.

    Raises:
        ValueError: a row has more than 16,384 weights.
    """
    outs, size = weights.shape
    if size > LONGEST:
        raise ValueError(f"rows of at most {LONGEST} weights are rounded, got {size}")
    filled = (size + _UNIT - 1) // _UNIT * _UNIT
    data = torch.empty((outs + BAND - 1) // BAND, (filled + 4) * BAND, dtype=torch.int8, device="cpu")
    for rows, bands in zip(in_pieces(weights), data.split(TOGETHER // BAND), strict=True):
        numbers, scales = torch.zeros(len(bands) * BAND, filled, **FLOATS), torch.zeros(len(bands) * BAND, 1, **FLOATS)
        scales[: len(rows)] = rows.float().abs().amax(1, keepdim=True) / 127
        numbers[: len(rows), :size] = rows
        numbers = (numbers / torch.where(scales > 0, scales, 1)).round().to(torch.int8)
        bands[:, : -4 * BAND] = numbers.view(len(bands), BAND, -1, 2).transpose(1, 2).flatten(1)
        bands[:, -4 * BAND :] = scales.view(torch.int8).view(len(bands), -1)
    return Rounded(data, (outs, size))


def light(weights: torch.Tensor | Stored) -> torch.Tensor | Rounded:
    """Weights of a draft in the form that is fastest for the kernels: rounded, or floats if the rows are too long."""
    if weights.shape[1] <= LONGEST:
        return rounded(weights)
    return weights.floats() if isinstance(weights, Stored) else weights.contiguous()


def in_pieces(weights: torch.Tensor | Stored) -> Iterator[torch.Tensor]:
    """Yields a matrix as floats, some rows at a time."""
    if isinstance(weights, torch.Tensor):
        yield from weights.detach().split(TOGETHER)
    else:
        yield from (Stored(rows, weights.format).floats() for rows in weights.data.split(TOGETHER))
