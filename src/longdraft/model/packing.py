"""Packed weights, for CPUs without our kernels: products of a few rows with large float32 matrices.

A verification multiplies every weight matrix with a few rows, for which torch's plain product reads the matrix badly.
oneDNN's product, with the weights reordered once, takes little longer than for one row. The price is a second copy of
the weights. So they are packed at the first such product (plain decoding never needs them), and only if free memory
holds them twice.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

import torch
from torch import nn

from longdraft.memory import sizes

logger = logging.getLogger("longdraft")

# Numbers of rows between which the packed product is faster than torch's.
FEWEST, MOST = 3, 32
SWITCH = "LONGDRAFT_PACK"


def available() -> bool:
    """True if this build of torch has oneDNN's packed products and LONGDRAFT_PACK=0 does not switch them off."""
    if os.environ.get(SWITCH, "1") == "0" or not torch.backends.mkldnn.is_available():
        return False
    return hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


class PackedLinear:
    """One weight matrix, packed at its first use, and again when it has changed.

    Args:
        weight: (out, in) float32 on the CPU.
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
    """True if a second copy of some layers' weights fits the free memory and leaves as much again."""
    needed = sum(w.numel() * w.itemsize for layer in layers if isinstance(w := layer.weight, torch.Tensor))
    free = sizes.available_bytes(torch.device("cpu"))
    fits = free is None or 2 * needed <= free
    if not fits:
        logger.info("Weights are not packed: %s more are needed.", sizes.human(needed))
    return fits


def pays(rows: int) -> bool:
    """True if packed weights are faster for this number of rows."""
    return FEWEST <= rows <= MOST


def packable(weight: torch.Tensor) -> bool:
    """True if a weight can be packed here."""
    plain = type(weight) in (torch.Tensor, nn.Parameter) and weight.device.type == "cpu"
    return plain and weight.dtype == torch.float32 and available()
