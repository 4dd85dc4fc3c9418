"""Activations that give a row the same bits whatever rows are beside it.

torch computes an activation in vectors, and the numbers left over at the end of the tensor, or of a thread's share, one
by one, which rounds differently. Which numbers those are depends on the number of rows. So where layers run their own
code, activations are computed row by row while text is decoded, at a cost of some microseconds a row. Our own layers
(native/layer.cpp) do not need this.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from longdraft.native import kernels


def install(model: nn.Module, wanted: Callable[[], bool]) -> None:
    """Replaces the forwards of a model's activations for good. The model must be a copy of our own.

    Args:
        wanted: called in each forward; while it returns False, activations are computed as usual.
    """
    if kernels() is None:  # without kernels, products do not give a row the same bits either
        return
    for module in model.modules():
        home = type(module).__module__
        activation = home in ("torch.nn.modules.activation", "transformers.activations")
        if activation and next(module.parameters(), None) is None and "forward" not in vars(module):
            vars(module)["forward"] = _by_row(module.forward, wanted)


def _by_row(forward: Callable[..., torch.Tensor], wanted: Callable[[], bool]) -> Callable[..., torch.Tensor]:
    def by_row(*given: torch.Tensor) -> torch.Tensor:
        x, *more = given
        size = x.shape[-1]
        if more or x.numel() <= size or x.dtype != torch.float32 or x.device.type != "cpu" or not wanted():
            return forward(*given)
        return torch.cat([forward(row) for row in x.reshape(-1, size).split(1)]).view_as(x)

    return by_row
