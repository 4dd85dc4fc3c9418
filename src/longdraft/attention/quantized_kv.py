"""Attends to a quantized KV cache on a GPU: dequantizes a layer's keys and values, then runs the target's path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch

from longdraft.attention import custom_ops
from longdraft.attention.forward_batch import NO_MODIFIERS, ForwardBatch, ScoreModifiers
from longdraft.attention.reference import AttentionFunction
from longdraft.native.quantized_kv import Int4KV, Int8KV, KVTensor, QuantizedKV


def accept_quantized_kv(attend: AttentionFunction) -> AttentionFunction:
    """Wraps an attention path, so that it also accepts keys and values in int8 and int4."""

    def attend_any_dtype(
        q: torch.Tensor,
        keys: KVTensor,
        values: KVTensor,
        batch: ForwardBatch,
        scale: float,
        modifiers: ScoreModifiers = NO_MODIFIERS,
        /,
    ) -> torch.Tensor:
        if isinstance(keys, QuantizedKV) and isinstance(values, QuantizedKV):
            kv_len = max(batch.prefix_lens, default=0) + batch.tree_len
            keys, values = (_dequantize(x, batch.slots_t, kv_len, q.dtype) for x in (keys, values))
            if "dequantized" not in batch.metadata:  # the dequantized sequence b is in slot b
                slots_t = torch.arange(batch.batch_size, dtype=torch.int32, device=q.device)
                batch.metadata["dequantized"] = replace(batch, slots=tuple(range(batch.batch_size)), slots_t=slots_t)
            batch = batch.metadata["dequantized"]
        return attend(q, cast(torch.Tensor, keys), cast(torch.Tensor, values), batch, scale, modifiers)

    return attend_any_dtype


def _dequantize(kv: QuantizedKV, slots: torch.Tensor, kv_len: int, dtype: torch.dtype) -> torch.Tensor:
    """Dequantizes the first ``kv_len`` entries of B slots. Returns (B, Hkv, kv_len, d) of ``dtype``."""
    reference: Callable[..., torch.Tensor]
    arguments: tuple[Any, ...]
    if isinstance(kv, Int4KV):
        reference, arguments = dequantize_int4_kv, (kv.data, slots, kv_len, kv.head_dim, kv.is_keys, dtype)
    else:
        assert isinstance(kv, Int8KV)
        reference, arguments = dequantize_int8_kv, (kv.quants, kv.scales, slots, kv_len, dtype)
    op = getattr(torch.ops.longdraft, reference.__name__) if custom_ops.triton_enabled() else reference
    return cast(torch.Tensor, op(*arguments))


def dequantize_int8_kv(
    quants: torch.Tensor, scales: torch.Tensor, slots: torch.Tensor, kv_len: int, dtype: torch.dtype
) -> torch.Tensor:
    """Dequantizes the first ``kv_len`` entries of B slots. Returns (B, Hkv, kv_len, d) of ``dtype``.

    Args:
        quants, scales: the cache of Hkv KV heads, (slots, Hkv, capacity, d) int8 and (slots, Hkv, capacity) float32.
        slots: (B,) int32, the slots to dequantize.
    """
    return Int8KV(*(x.narrow(2, 0, kv_len).index_select(0, slots) for x in (quants, scales))).to(dtype)


def dequantize_int4_kv(
    data: torch.Tensor, slots: torch.Tensor, kv_len: int, head_dim: int, is_keys: bool, dtype: torch.dtype
) -> torch.Tensor:
    """Does what :func:`dequantize_int8_kv` does for a cache in int4, (slots, Hkv, capacity, bytes) uint8."""
    return Int4KV(data.narrow(2, 0, kv_len).index_select(0, slots), head_dim, is_keys).to(dtype)


for _reference in (dequantize_int8_kv, dequantize_int4_kv):
    custom_ops.define_op(_reference, "longdraft.attention.quantized_kv_kernel")
