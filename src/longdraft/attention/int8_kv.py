"""Attention to an int8 KV cache on a GPU: each layer is dequantized, then the target's path attends to it."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from longdraft.attention import custom_ops
from longdraft.attention.forward_batch import NO_MODIFIERS, ForwardBatch, ScoreModifiers
from longdraft.attention.reference import AttentionFunction
from longdraft.native.int8_kv import Int8KV, KVTensor


def accept_int8_kv(attend: AttentionFunction) -> AttentionFunction:
    """Makes ``attend`` accept int8 keys and values too."""

    def attend_either(
        q: torch.Tensor,
        keys: KVTensor,
        values: KVTensor,
        batch: ForwardBatch,
        scale: float,
        modifiers: ScoreModifiers = NO_MODIFIERS,
        /,
    ) -> torch.Tensor:
        if isinstance(keys, Int8KV) and isinstance(values, Int8KV):
            kv_len = max(batch.prefix_lens, default=0) + batch.tree_len
            compute = torch.ops.longdraft.dequantize_kv if custom_ops.triton_enabled() else dequantize_kv
            keys, values = (compute(x.quants, x.scales, batch.slots_t, kv_len, q.dtype) for x in (keys, values))
            if "dequantized" not in batch.metadata:  # once for all layers
                slots_t = torch.arange(batch.batch_size, dtype=torch.int32, device=q.device)
                batch.metadata["dequantized"] = replace(batch, slots=tuple(range(batch.batch_size)), slots_t=slots_t)
            batch = batch.metadata["dequantized"]
        return attend(q, cast(torch.Tensor, keys), cast(torch.Tensor, values), batch, scale, modifiers)

    return attend_either


def dequantize_kv(
    quantized: torch.Tensor, scales: torch.Tensor, slots: torch.Tensor, kv_len: int, dtype: torch.dtype
) -> torch.Tensor:
    """Dequantizes the first ``kv_len`` entries of B slots, to (B, Hkv, kv_len, d).

    Args:
        quantized, scales: (slots, Hkv, capacity, d) int8 and (slots, Hkv, capacity) float32.
        slots: (B,) int32.
    """
    quantized, scales = (x.narrow(2, 0, kv_len).index_select(0, slots) for x in (quantized, scales))
    return (quantized * scales[..., None]).to(dtype)


custom_ops.define_op(dequantize_kv, "longdraft.attention.int8_kv_kernel")
