"""Checks tensors before a C++ kernel gets their addresses.

torch's default dtype and device can change at any time, also by another thread that loads a model. So every tensor is
created with an explicit dtype and device, and :func:`address` checks both.
"""

from __future__ import annotations

from typing import Any

import torch

from longdraft.huge_pages import allocate

# Arguments of factories: torch.empty(n, **CPU_FLOAT32).
CPU_FLOAT32: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
CPU_INT64: dict[str, Any] = {"dtype": torch.long, "device": "cpu"}

_LARGE = 4 << 20  # bytes: from this size on a buffer contains a whole huge page


def address(
    x: torch.Tensor | None, dtype: torch.dtype = torch.float32, min_numel: int | None = None, strided_rows: bool = False
) -> int | None:
    """The address of a tensor for a kernel; None for None.

    Args:
        min_numel: elements that the kernel accesses; None: not checked.
        strided_rows: only the last dimension must be contiguous; the kernel gets the other strides.

    Raises:
        TypeError: the tensor has another dtype, device or layout, or is smaller.
    """
    if x is None:
        return None
    laid_out = x.stride(-1) == 1 if strided_rows else x.is_contiguous()
    if x.dtype is not dtype or not x.is_cpu or not laid_out or (min_numel is not None and x.numel() < min_numel):
        expected = f"{dtype} on the CPU, contiguous{'' if min_numel is None else f', {min_numel} numbers'}"
        raise TypeError(f"a kernel takes {expected}; got {x.dtype} on {x.device}, {tuple(x.shape)}, {x.stride()}")
    return x.data_ptr()


def allocate_bytes(size: int) -> torch.Tensor:
    """An uninitialized byte buffer; a large one is in huge pages."""
    pages = allocate(size) if size >= _LARGE else None
    if pages is None:
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(pages, dtype=torch.uint8)
