"""The boundary to C++: what a tensor has to be like before a kernel gets its address.

torch's default dtype and default device can change at any time, also by another thread that loads a model. So every
tensor has its dtype and device said where it is made, and :func:`address` checks both where it is handed over.
"""

from __future__ import annotations

from typing import Any

import torch

from longdraft.pages import large

# For tensors on the host: torch.empty(n, **FLOATS).
FLOATS: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
WHOLE: dict[str, Any] = {"dtype": torch.long, "device": "cpu"}

_LARGE = 4 << 20  # bytes that hold a large page wherever they begin


def address(
    x: torch.Tensor | None, dtype: torch.dtype = torch.float32, size: int | None = None, rows: bool = False
) -> int | None:
    """The address of a tensor for a kernel; None for no tensor.

    Args:
        size: numbers that the kernel reads or writes; None for any.
        rows: the kernel knows the strides of the rows, so that only the last dimension has to be contiguous.

    Raises:
        TypeError: the tensor is of another dtype, on another device, in another layout, or smaller.
    """
    if x is None:
        return None
    laid_out = x.stride(-1) == 1 if rows else x.is_contiguous()
    if x.dtype is not dtype or not x.is_cpu or not laid_out or (size is not None and x.numel() < size):
        expected = f"{dtype} on the CPU, contiguous{'' if size is None else f', {size} numbers'}"
        raise TypeError(f"a kernel takes {expected}; got {x.dtype} on {x.device}, {tuple(x.shape)}, {x.stride()}")
    return x.data_ptr()


def memory_of(size: int) -> torch.Tensor:
    """So many bytes, in large pages if that is many: :func:`longdraft.pages.large`."""
    pages = large(size) if size >= _LARGE else None
    if pages is None:
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(pages, dtype=torch.uint8)
