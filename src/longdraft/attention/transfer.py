"""Copies between host and device that do not make the host wait for the device.

``torch.tensor(values, device="cuda")`` copies from pageable memory, so the host waits until the device has done all
queued work. A copy from pinned memory is queued behind the work, and the host continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def to_device(
    values: Sequence[Any] | torch.Tensor, device: torch.device | str, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Returns values as a tensor on a device.

    Args:
        values: nested lists, or a tensor on any device.
        dtype: dtype of the result; None: the dtype of the tensor, or what ``torch.tensor`` chooses for lists.
    """
    tensor = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype, device="cpu")
    tensor = tensor.to(dtype or tensor.dtype)
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return _pinned(tensor).to(device, non_blocking=True)
    return tensor.to(device)


class AsyncHostCopy:
    """Starts to copy a tensor to the host. :meth:`tolist` waits for the copy, not for work queued after it."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values, self._done = values, None
        if values.device.type == "cuda":
            self._values = values.to("cpu", non_blocking=True)  # to pinned memory
            self._done = torch.cuda.Event()
            self._done.record()

    def tolist(self) -> list[Any]:
        """Waits for the copy, and returns the values as nested lists."""
        if self._done is not None:
            self._done.synchronize()
        result: list[Any] = self._values.tolist()
        return result


def copy_to_buffer(buffer: torch.Tensor, values: Sequence[Any]) -> None:
    """Writes values into a buffer on a device, in one copy."""
    tensor = torch.as_tensor(values, dtype=buffer.dtype, device="cpu")
    buffer.copy_(_pinned(tensor) if buffer.device.type == "cuda" else tensor, non_blocking=True)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    # torch cannot pin a tensor whose elements share memory, such as an expanded mask.
    return tensor.contiguous().pin_memory()
