"""Gives positions to models that have no argument for them: decoders that count the rows of their cache.

Their forward hands the cache's length to a position embedding, which also takes positions. Ours get those of the block:
the rows of a tree are not one behind the other.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from longdraft.model import hosting

# What transformers calls the length of the cache, in its own words of 5.24 and of 5.17.
_LENGTHS = ("cache_length", "past_key_values_length")


def install(model: PreTrainedModel) -> None:
    """Adds hooks to the position embeddings of a copy of our own, if its forward takes no positions."""
    if _takes(model, "position_ids"):
        return
    for module in model.modules():
        if _takes(module, "position_ids") and any(_takes(module, name) for name in _LENGTHS):
            module.register_forward_pre_hook(_positions, with_kwargs=True)
            module.register_forward_hook(_shaped)


def _positions(_module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    hosted = hosting.running()
    if hosted is None or hosted.layout.own or len(given) > 2:
        return None
    return given, named | {"position_ids": hosted.block.positions}


def _shaped(_module: nn.Module, _given: Any, output: torch.Tensor) -> torch.Tensor:
    """(B, T, hidden): some embeddings take positions (T,), and put another dimension before ours."""
    hosted = hosting.running()
    if hosted is None or hosted.layout.own or hosted.block.positions is None:
        return output
    return output.reshape(*hosted.block.positions.shape, -1)


def _takes(module: nn.Module, name: str) -> bool:
    return name in inspect.signature(type(module).forward).parameters
