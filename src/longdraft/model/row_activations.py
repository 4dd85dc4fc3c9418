"""Activations that give a row the same bits whatever rows are beside it.

torch computes an activation in vectors, and the numbers left over at the end of the tensor, or of a thread's share, one
by one, which rounds differently. Which numbers those are depends on the number of rows. So where layers run their own
code, activations are computed in whole vectors while text is decoded. Our own layers (native/layer.cpp) need no such
care.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from longdraft.model.row_functions import whole_vectors
from longdraft.native import kernels

# Activations of a row's numbers together: they are computed row by row.
_NOT_ELEMENTWISE = (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softmax2d, nn.GLU)


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
            exact = _by_row if type(module) in _NOT_ELEMENTWISE else _by_number
            vars(module)["forward"] = exact(module.forward, wanted)


def _by_number(forward: Callable[[torch.Tensor], torch.Tensor], wanted: Callable[[], bool]) -> Callable[..., Any]:
    def by_number(x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32 or x.device.type != "cpu" or not wanted():
            return forward(x)
        return whole_vectors(forward, x)

    return by_number


def _by_row(forward: Callable[..., torch.Tensor], wanted: Callable[[], bool]) -> Callable[..., torch.Tensor]:
    def by_row(*given: torch.Tensor) -> torch.Tensor:
        x, *more = given
        size = x.shape[-1]
        if more or x.numel() <= size or x.dtype != torch.float32 or x.device.type != "cpu" or not wanted():
            return forward(*given)
        return torch.cat([forward(row) for row in x.reshape(-1, size).split(1)]).view_as(x)

    return by_row
