"""Attention to keys and values in eight bits on a GPU: a layer's rows are unpacked for the path of the target."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch

from longdraft.attention.block import Block
from longdraft.attention.prefix import PrefixAttend
from longdraft.attention.reference import Attend
from longdraft.native.scaled import KeptRows, Scaled

Path = TypeVar("Path", Attend, PrefixAttend)


def or_scaled(attend: Path) -> Path:
    """``attend``, which takes keys and values in eight bits too."""

    def either(q: torch.Tensor, keys: KeptRows, values: KeptRows, block: Block, *more: Any) -> torch.Tensor:
        if isinstance(keys, Scaled) and isinstance(values, Scaled):
            behind = max(block.lengths, default=0) + block.width
            keys, values = (x[:, :, :behind].to(q.dtype) for x in (keys, values))
        return attend(q, cast(torch.Tensor, keys), cast(torch.Tensor, values), block, *more)

    return cast(Path, either)
