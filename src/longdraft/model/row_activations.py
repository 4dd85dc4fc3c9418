"""Activations that give a row the same bits whatever rows are beside it.

torch computes an activation of many numbers in vectors, and what fills no vector at the end of the numbers, or of a
thread's share of them, one by one, which rounds otherwise. Which numbers those are depends on how many rows there are.
So where layers run their own code, activations are computed row by row while text is decoded: some microseconds a row.
Our own layers (native/layer.cpp) need none of this.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from longdraft.native import kernels


def install(model: nn.Module, wanted: Callable[[], bool]) -> None:
    """Puts this into the place of the activations' own forwards, for good: the model has to be nobody's but ours.

    Args:
        wanted: asked in each forward; False leaves activations as they are.
    """
    if kernels() is None:  # nothing else would give a row the same bits
        return
    for module in model.modules():
        if _is_activation(module) and "forward" not in vars(module):
            vars(module)["forward"] = _by_row(module.forward, wanted)


def _is_activation(module: nn.Module) -> bool:
    home = type(module).__module__
    return home in ("torch.nn.modules.activation", "transformers.activations") and not any(module.parameters())


def _by_row(forward: Callable[[torch.Tensor], torch.Tensor], wanted: Callable[[], bool]) -> Callable[..., torch.Tensor]:
    def by_row(x: torch.Tensor) -> torch.Tensor:
        size = x.shape[-1]
        if x.numel() <= size or x.dtype != torch.float32 or x.device.type != "cpu" or not wanted():
            return forward(x)
        return torch.cat([forward(row) for row in x.reshape(-1, size).split(1)]).view_as(x)

    return by_row
