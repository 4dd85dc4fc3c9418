"""A draft's weights, rounded: see rounded.cpp. A draft need not be exact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from longdraft.native.stored import Stored

# Rows of a band; what a row is filled up to a multiple of; the longest row; rows that are rounded at a time, for a head
# is large, and so is what is computed on the way.
BAND, _UNIT, LONGEST, TOGETHER = 16, 4, 16384, 4096


@dataclass(frozen=True)
class Rounded:
    """A matrix (out, in) of whole numbers from -127 to 127, and a scale a row.

    Attributes:
        data: (bands of 16 rows, bytes of a band) int8: of every two columns the rows' numbers, a row's two beside one
            another, zeros up to a multiple of 4 columns; and the rows' scales, four bytes each. See rounded.h.
        shape: (out, in).
    """

    data: torch.Tensor
    shape: tuple[int, int]
    number = -1
    """Of the format, for the kernels."""

    def floats(self) -> torch.Tensor:
        """(out, in) float32: what the numbers stand for."""
        outs, size = self.shape
        numbers = self.data[:, : -4 * BAND].unflatten(1, (-1, BAND, 2)).transpose(1, 2).flatten(2).flatten(0, 1)
        scales = self.data[:, -4 * BAND :].contiguous().view(torch.float32).view(-1, 1)
        return numbers[:outs, :size].float() * scales[:outs]


def rounded(weights: torch.Tensor | Stored) -> Rounded:
    """A matrix (out, in), each row rounded to the nearest of 255 numbers.

    Raises:
        ValueError: more than 16,384 numbers in a row.
    """
    outs, size = weights.shape
    if size > LONGEST:
        raise ValueError(f"rows of at most {LONGEST} weights are rounded, got {size}")
    filled = (size + _UNIT - 1) // _UNIT * _UNIT
    data = torch.empty((outs + BAND - 1) // BAND, (filled + 4) * BAND, dtype=torch.int8)
    for rows, bands in zip(in_pieces(weights), data.split(TOGETHER // BAND), strict=True):
        numbers, scales = torch.zeros(len(bands) * BAND, filled), torch.zeros(len(bands) * BAND, 1)
        scales[: len(rows)] = rows.float().abs().amax(1, keepdim=True) / 127
        numbers[: len(rows), :size] = rows
        numbers = (numbers / torch.where(scales > 0, scales, 1)).round().to(torch.int8)
        bands[:, : -4 * BAND] = numbers.view(len(bands), BAND, -1, 2).transpose(1, 2).flatten(1)
        bands[:, -4 * BAND :] = scales.view(torch.int8).view(len(bands), -1)
    return Rounded(data, (outs, size))


def light(weights: torch.Tensor | Stored) -> torch.Tensor | Rounded:
    """Weights of a draft as the kernels are to read them: rounded, but for rows that are too long."""
    if weights.shape[1] <= LONGEST:
        return rounded(weights)
    return weights.floats() if isinstance(weights, Stored) else weights.contiguous()


def in_pieces(weights: torch.Tensor | Stored) -> Iterator[torch.Tensor]:
    """A matrix as floats, some rows at a time."""
    if isinstance(weights, torch.Tensor):
        yield from weights.detach().split(TOGETHER)
    else:  # never all of it as floats
        yield from (Stored(rows, weights.format).floats() for rows in weights.data.split(TOGETHER))
