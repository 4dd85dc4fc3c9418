"""The boundary to C++: what a tensor has to be like before a kernel gets its address.

torch's default dtype and default device can change at any time, also by another thread that loads a model. So every
tensor has its dtype and device said where it is made, and :func:`address` checks both where it is handed over.
"""

from __future__ import annotations

from typing import Any

import torch

from longdraft.huge_pages import allocate

# For tensors on the host: torch.empty(n, **FLOATS).
CPU_FLOAT32: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
CPU_INT64: dict[str, Any] = {"dtype": torch.long, "device": "cpu"}

_LARGE = 4 << 20  # bytes that hold a large page wherever they begin


def address(
    x: torch.Tensor | None, dtype: torch.dtype = torch.float32, min_numel: int | None = None, strided_rows: bool = False
) -> int | None:
    """The address of a tensor for a kernel; None for no tensor.

    Args:
        min_numel: numbers that the kernel reads or writes; None for any.
        strided_rows: the kernel knows the strides of the rows, so that only the last dimension has to be contiguous.

    Raises:
        TypeError: the tensor is of another dtype, on another device, in another layout, or smaller.
    """
    if x is None:
        return None
    laid_out = x.stride(-1) == 1 if strided_rows else x.is_contiguous()
    if x.dtype is not dtype or not x.is_cpu or not laid_out or (min_numel is not None and x.numel() < min_numel):
        expected = f"{dtype} on the CPU, contiguous{'' if min_numel is None else f', {min_numel} numbers'}"
        raise TypeError(f"a kernel takes {expected}; got {x.dtype} on {x.device}, {tuple(x.shape)}, {x.stride()}")
    return x.data_ptr()


def allocate_bytes(size: int) -> torch.Tensor:
    """So many bytes, in large pages if that is many: :func:`longdraft.huge_pages.allocate`."""
    pages = allocate(size) if size >= _LARGE else None
    if pages is None:
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(pages, dtype=torch.uint8)
