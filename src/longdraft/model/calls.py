"""Records how a model calls its attention function: how often in a forward, and with keys and values of what sizes.

A configuration does not always say it: layers may share keys, attend twice, run several times or be skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from longdraft.memory.recurrent import RecurrentShape


@dataclass(frozen=True)
class Call:
    """One call of the attention function.

    Attributes:
        module: name of the class of the attention module.
        kv_heads: number of heads of keys and values.
        head_dim, value_dim: sizes of a key and of a value.
        layer: the module's number of its layer; None if it has none.
        window: the ``sliding_window`` argument.
        source: index of the earlier call whose keys and values it takes; None if it has some of its own.
    """

    module: str
    kv_heads: int
    head_dim: int
    value_dim: int
    layer: int | None = None
    window: int | None = None
    source: int | None = None


@dataclass(frozen=True)
class Recorded:
    """The records of a forward.

    Attributes:
        calls: of the attention function, in order.
        recurrent: sizes of the states of recurrent layers, which are numbered in the order of their modules.
        own: the model attends with code of its own, and these calls are the layers of its cache.
    """

    calls: tuple[Call, ...]
    recurrent: Mapping[int, RecurrentShape] = field(default_factory=dict)
    own: bool = False


class Recording:
    """Records a forward; it stands in the place of attention.

    Attributes:
        calls: of the attention function, in order.
        mixers: recurrent layers by their number, with what they were called with (:mod:`.recurrent`).
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.mixers: dict[int, Any] = {}
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **more: Any
    ) -> tuple[torch.Tensor, None]:
        """Notes a call. The result has the right shape, and no meaning."""
        number, window = getattr(module, "layer_idx", None), more.get("sliding_window")
        call = Call(
            type(module).__name__,
            key.shape[1],
            key.shape[-1],
            value.shape[-1],
            number if isinstance(number, int) else None,
            window if isinstance(window, int) else None,
            next((i for i, (k, v) in enumerate(self._kept) if k is key and v is value), None),
        )
        self.calls.append(call)
        self._kept.append((key, value))
        return value.new_zeros(*query.shape[:3], value.shape[-1]).transpose(1, 2).contiguous(), None


recorded: WeakKeyDictionary[PreTrainedModel, Recorded] = WeakKeyDictionary()
"""The records of models' forwards. The configuration of a model that is not here says all there is to say."""
