"""Attention to keys and values in eight bits on a GPU: a layer's rows are unpacked for the path of the target."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from longdraft.attention import custom_ops
from longdraft.attention.forward_batch import NO_MODIFIERS, ForwardBatch, ScoreModifiers
from longdraft.attention.reference import AttentionFunction
from longdraft.native.int8_kv import Int8KV, KVTensor


def accept_int8_kv(attend: AttentionFunction) -> AttentionFunction:
    """``attend``, which takes keys and values in eight bits too."""

    def either(
        q: torch.Tensor,
        keys: KVTensor,
        values: KVTensor,
        block: ForwardBatch,
        scale: float,
        scoring: ScoreModifiers = NO_MODIFIERS,
        /,
    ) -> torch.Tensor:
        if isinstance(keys, Int8KV) and isinstance(values, Int8KV):
            behind = max(block.prefix_lens, default=0) + block.tree_len
            compute = torch.ops.longdraft.dequantize_kv if custom_ops.triton_enabled() else dequantize_kv
            keys, values = (compute(x.quants, x.scales, block.slots_t, behind, q.dtype) for x in (keys, values))
            if "unpacked" not in block.metadata:  # for all layers
                own = torch.arange(block.batch_size, dtype=torch.int32, device=q.device)
                block.metadata["unpacked"] = replace(block, slots=tuple(range(block.batch_size)), slots_t=own)
            block = block.metadata["unpacked"]
        return attend(q, cast(torch.Tensor, keys), cast(torch.Tensor, values), block, scale, scoring)

    return either


def dequantize_kv(
    quantized: torch.Tensor, scales: torch.Tensor, slots: torch.Tensor, kv_len: int, dtype: torch.dtype
) -> torch.Tensor:
    """The first ``kv_len`` rows of B slots as floats (B, Hkv, rows, d).

    Args:
        numbers, scales: (slots, Hkv, capacity, d) int8 and (slots, Hkv, capacity) float32.
        slots: (B,) int32.
    """
    own, factors = (x.narrow(2, 0, kv_len).index_select(0, slots) for x in (quantized, scales))
    return (own * factors[..., None]).to(dtype)


custom_ops.define_op(dequantize_kv, "longdraft.attention.int8_kv_kernel")
