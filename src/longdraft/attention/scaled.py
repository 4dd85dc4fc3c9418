"""Attention to keys and values in eight bits on a GPU: a layer's rows are unpacked for the path of the target."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from longdraft.attention import fusing
from longdraft.attention.block import PLAIN, Block, Scoring
from longdraft.attention.reference import Attend
from longdraft.native.scaled import KeptRows, Scaled


def or_scaled(attend: Attend) -> Attend:
    """``attend``, which takes keys and values in eight bits too."""

    def either(
        q: torch.Tensor, keys: KeptRows, values: KeptRows, block: Block, scale: float, scoring: Scoring = PLAIN, /
    ) -> torch.Tensor:
        if isinstance(keys, Scaled) and isinstance(values, Scaled):
            behind = max(block.lengths, default=0) + block.width
            compute = torch.ops.longdraft.unpack_rows if fusing.available() else unpack_rows
            keys, values = (compute(x.numbers, x.scales, block.slots_t, behind, q.dtype) for x in (keys, values))
            if "unpacked" not in block.derived:  # for all layers
                own = torch.arange(block.batch, dtype=torch.int32, device=q.device)
                block.derived["unpacked"] = replace(block, slots=tuple(range(block.batch)), slots_t=own)
            block = block.derived["unpacked"]
        return attend(q, cast(torch.Tensor, keys), cast(torch.Tensor, values), block, scale, scoring)

    return either


def unpack_rows(
    numbers: torch.Tensor, scales: torch.Tensor, slots: torch.Tensor, rows: int, dtype: torch.dtype
) -> torch.Tensor:
    """The first ``rows`` rows of B slots as floats (B, Hkv, rows, d).

    Args:
        numbers, scales: (slots, Hkv, capacity, d) int8 and (slots, Hkv, capacity) float32.
        slots: (B,) int32.
    """
    own, factors = (x.narrow(2, 0, rows).index_select(0, slots) for x in (numbers, scales))
    return (own * factors[..., None]).to(dtype)


fusing.define(unpack_rows, "longdraft.attention.scaled_kernel")
