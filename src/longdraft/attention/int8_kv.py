"""Attends to an int8 KV cache on a GPU: dequantizes a layer's keys and values, and runs the target's path on them."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from longdraft.attention import custom_ops
from longdraft.attention.forward_batch import NO_MODIFIERS, ForwardBatch, ScoreModifiers
from longdraft.attention.reference import AttentionFunction
from longdraft.native.quantized_kv import Int8KV, KVTensor


def accept_int8_kv(attend: AttentionFunction) -> AttentionFunction:
    """Wraps an attention path, so that it also accepts keys and values in int8."""

    def attend_any_dtype(
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
            dequantize = torch.ops.longdraft.dequantize_kv if custom_ops.triton_enabled() else dequantize_kv
            keys, values = (dequantize(x.quants, x.scales, batch.slots_t, kv_len, q.dtype) for x in (keys, values))
            if "dequantized" not in batch.metadata:  # the dequantized sequence b is in slot b
                slots_t = torch.arange(batch.batch_size, dtype=torch.int32, device=q.device)
                batch.metadata["dequantized"] = replace(batch, slots=tuple(range(batch.batch_size)), slots_t=slots_t)
            batch = batch.metadata["dequantized"]
        return attend(q, cast(torch.Tensor, keys), cast(torch.Tensor, values), batch, scale, modifiers)

    return attend_any_dtype


def dequantize_kv(
    quants: torch.Tensor, scales: torch.Tensor, slots: torch.Tensor, kv_len: int, dtype: torch.dtype
) -> torch.Tensor:
    """Dequantizes the first ``kv_len`` entries of B slots. Returns (B, Hkv, kv_len, d) of ``dtype``.

    Args:
        quants, scales: the cache of Hkv KV heads, (slots, Hkv, capacity, d) int8 and (slots, Hkv, capacity) float32.
        slots: (B,) int32, the slots to dequantize.
    """
    quants, scales = (x.narrow(2, 0, kv_len).index_select(0, slots) for x in (quants, scales))
    return (quants * scales[..., None]).to(dtype)


custom_ops.define_op(dequantize_kv, "longdraft.attention.int8_kv_kernel")
