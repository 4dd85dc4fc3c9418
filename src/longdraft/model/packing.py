"""Packed weights: on a CPU, products of a few rows with large float32 matrices cost little more than one row's.

A verification multiplies every weight matrix with a handful of rows. torch's plain product reads the matrix badly for
that; oneDNN's, with the weights reordered once, is bound by reading them, as a single row is. The price is a second
copy of the weights, so they are packed when the first such product is asked for (plain decoding never pays it), and
not at all where the memory that is free would not hold them twice.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

import torch
from torch import nn

from longdraft.memory import sizes

logger = logging.getLogger("longdraft")

# Rows between which the packed product wins: one or two are faster without, and many are bound by arithmetic.
FEWEST, MOST = 3, 32
SWITCH = "LONGDRAFT_PACK"


def available() -> bool:
    """Whether this build of torch has oneDNN's packed products, and nobody switched them off (LONGDRAFT_PACK=0)."""
    if os.environ.get(SWITCH, "1") == "0" or not torch.backends.mkldnn.is_available():
        return False
    return hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


class PackedLinear:
    """One weight matrix, packed when it is first used.

    Args:
        weight: (out, in) float32 on the CPU. It is not changed; when it is, it is packed anew.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self._packed: torch.Tensor | None = None
        self._version = -1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., in) -> (..., out), as ``F.linear``."""
        version = 0 if self.weight.is_inference() else self.weight._version
        if self._packed is None or version != self._version:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach())
            self._version = version
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out


def room_for(layers: Iterable[nn.Module]) -> bool:
    """Whether a second copy of some layers' weights fits the free memory, and leaves as much again."""
    needed = sum(w.numel() * w.itemsize for layer in layers if isinstance(w := layer.weight, torch.Tensor))
    free = sizes.available_bytes(torch.device("cpu"))
    fits = free is None or 2 * needed <= free
    if not fits:
        logger.info("Weights are not packed: %s more are needed.", sizes.human(needed))
    return fits


def pays(rows: int) -> bool:
    """Whether packed weights are faster for this many rows."""
    return FEWEST <= rows <= MOST


def packable(weight: torch.Tensor) -> bool:
    """Whether a weight can be packed here."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and available()
