"""Checks tensors before a C++ kernel gets their addresses.

torch's default dtype and device can change at any time, even in another thread that loads a model. So this package
creates every tensor with an explicit dtype and device, and :func:`address` checks both.
"""

from __future__ import annotations

from typing import Any

import torch

from longdraft.huge_pages import allocate

# Keyword arguments for tensor factories: torch.empty(n, **CPU_FLOAT32).
CPU_FLOAT32: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
CPU_INT64: dict[str, Any] = {"dtype": torch.long, "device": "cpu"}

_HUGE_PAGE_MIN_BYTES = 4 << 20  # from this size on a buffer contains a whole huge page (2 MiB), however aligned


def address(
    x: torch.Tensor | None, dtype: torch.dtype = torch.float32, min_numel: int | None = None, strided_rows: bool = False
) -> int | None:
    """Returns the address of a tensor for a kernel, or None (a null pointer) if ``x`` is None.

    Args:
        x: the tensor, on the CPU, or None.
        dtype: the dtype that the kernel reads.
        min_numel: number of elements that the kernel accesses; None: not checked.
        strided_rows: True: only the last dimension must be contiguous, because the kernel gets the other strides.

    Raises:
        TypeError: the tensor has a wrong dtype, device or layout, or too few elements.
    """
    if x is None:
        return None
    has_layout = x.stride(-1) == 1 if strided_rows else x.is_contiguous()
    if x.dtype is not dtype or not x.is_cpu or not has_layout or (min_numel is not None and x.numel() < min_numel):
        expected = f"{dtype} on the CPU, contiguous{'' if min_numel is None else f', at least {min_numel} numbers'}"
        raise TypeError(f"a kernel takes {expected}; got {x.dtype} on {x.device}, {tuple(x.shape)}, {x.stride()}")
    return x.data_ptr()


def allocate_bytes(size: int) -> torch.Tensor:
    """Returns an uninitialized buffer (size,) uint8, in huge pages if it is large."""
    pages = allocate(size) if size >= _HUGE_PAGE_MIN_BYTES else None
    if pages is None:
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(pages, dtype=torch.uint8)
