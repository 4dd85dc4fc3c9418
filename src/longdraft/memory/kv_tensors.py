"""Allocates and copies keys and values of any KV dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from longdraft.native.quantized_kv import INT4, Int4KV, Int8KV, KVTensor, QuantizedKV

_CACHE_LINE = 64  # bytes


def empty_kv(
    size: Sequence[int], dtype: torch.dtype, device: torch.device, *, is_keys: bool, transposed: bool = False
) -> torch.Tensor:
    """Returns uninitialized keys or values of ``size`` (..., entries, head_dim); see :func:`empty_transposed`.
    Quantized ones are no tensor, but behave like one wherever entries are read and written."""
    allocate = empty_transposed if transposed else torch.empty
    *outer, head_dim = size
    if dtype == INT4:
        data = allocate((*outer, Int4KV.bytes_of(head_dim, is_keys)), dtype=torch.uint8, device=device)
        return cast(torch.Tensor, Int4KV(data, head_dim, is_keys))
    numbers = allocate(size, dtype=dtype, device=device)
    if dtype == torch.int8:
        scales = torch.empty(outer, dtype=torch.float32, device=device)
        return cast(torch.Tensor, Int8KV(numbers, scales))
    return numbers


def as_tensor(kv: KVTensor) -> torch.Tensor:
    """Returns keys or values as they are stored: quantized ones as bytes, which can be written back."""
    return kv.to_bytes() if isinstance(kv, QuantizedKV) else kv


def empty_transposed(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns an uninitialized tensor of ``size`` (..., rows, dim), whose layout in memory is (..., dim, rows)."""
    *outer, rows, dim = size
    # Each row in memory begins on a cache line, because a vector load across two lines costs two accesses.
    per_line = _CACHE_LINE // dtype.itemsize
    transposed = torch.empty((*outer, dim, -(-rows // per_line) * per_line), dtype=dtype, device=device)
    return transposed[..., :rows].transpose(-1, -2)
