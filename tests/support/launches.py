"""Counts kernel launches: operations of torch that launch a kernel on a GPU, and longdraft's own operators."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operations that launch nothing: they allocate tensors. (Views launch nothing either; their schemas show them.)
_NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh"}
# Flash attention that splits its keys merges the parts in a second launch.
_TWO = {"_flash_attention_forward"}


class Launches(TorchDispatchMode):
    """Counts launches by the operation's name while it is active and ``open``. The simulated GPU runs inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.open = False
        self.forget()

    def forget(self) -> None:
        """Resets the counts."""
        self.counts: Counter[str] = Counter()
        self.forwards = 0

    @property
    def per_forward(self) -> float:
        """Launches of one forward of the layer of :func:`count_launches`."""
        return sum(self.counts.values()) / self.forwards

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if self.open and name not in _NOTHING and not _is_view(func):
            self.counts[name] += 2 if name in _TWO else 1
        return func(*args, **(kwargs or {}))


def _is_view(func: Any) -> bool:
    """True if an operation returns a view of its input."""
    aliases = [result.alias_info for result in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def count_launches(counting: Launches, layer: torch.nn.Module) -> None:
    """Counts a layer's launches by hooks, which the model's execution copy takes over."""

    def begin(*_: Any) -> None:
        counting.open = True
        counting.forwards += 1

    def end(*_: Any) -> None:
        counting.open = False

    layer.register_forward_pre_hook(begin)
    layer.register_forward_hook(end)
