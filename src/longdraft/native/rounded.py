"""A draft's weights, rounded: see rounded.cpp. A draft need not be exact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from longdraft.native.stored import Stored

# Numbers that a row is filled up to a multiple of; the longest row, for whose sums there is room; rows that are rounded
# at a time, for a head is large, and so is what is computed on the way.
_UNIT, LONGEST, _TOGETHER = 32, 16384, 4096


@dataclass(frozen=True)
class Rounded:
    """A matrix (out, in) of whole numbers from -127 to 127, and a scale a row.

    Attributes:
        data: (out, bytes of a row) int8: the numbers, zeros up to a multiple of 32, and the scale's four bytes.
        shape: (out, in).
    """

    data: torch.Tensor
    shape: tuple[int, int]
    number = -1
    """Of the format, for the kernels."""

    def floats(self) -> torch.Tensor:
        """(out, in) float32: what the numbers stand for."""
        return self.data[:, : self.shape[1]].float() * self.data[:, -4:].contiguous().view(torch.float32)


def rounded(weights: torch.Tensor | Stored) -> Rounded:
    """A matrix (out, in), each row rounded to the nearest of 255 numbers.

    Raises:
        ValueError: more than 16,384 numbers in a row.
    """
    outs, size = weights.shape
    if size > LONGEST:
        raise ValueError(f"rows of at most {LONGEST} weights are rounded, got {size}")
    data = torch.zeros(outs, (size + _UNIT - 1) // _UNIT * _UNIT + 4, dtype=torch.int8)
    for rows, into in zip(_pieces(weights), data.split(_TOGETHER), strict=True):
        scales = rows.float().abs().amax(1, keepdim=True) / 127
        into[:, :size] = (rows / torch.where(scales > 0, scales, 1)).round()
        into[:, -4:] = scales.view(torch.int8)
    return Rounded(data, (outs, size))


def _pieces(weights: torch.Tensor | Stored) -> Iterator[torch.Tensor]:
    if isinstance(weights, torch.Tensor):
        yield from weights.detach().split(_TOGETHER)
    else:  # never all of it as floats
        yield from (Stored(rows, weights.format).floats() for rows in weights.data.split(_TOGETHER))
