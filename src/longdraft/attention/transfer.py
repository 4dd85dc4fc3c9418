"""Copies numbers from the host to the device without waiting for the device.

``torch.tensor(numbers, device="cuda")`` copies from pageable memory, and the host then waits until the device has
finished its queued work. A copy from pinned memory is queued behind that work, and the host goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def to_device(
    values: Sequence[Any] | torch.Tensor, device: torch.device | str, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The numbers as a tensor on the device.

    Args:
        numbers: nested lists, or a tensor on either device.
        dtype: dtype of the result; None for the one that ``torch.as_tensor`` chooses.
    """
    tensor = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype, device="cpu")
    tensor = tensor.to(dtype or tensor.dtype)
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return _pinned(tensor).to(device, non_blocking=True)
    return tensor.to(device)


class AsyncHostCopy:
    """Numbers on their way to the host. :meth:`tolist` waits for them alone, not for work that was queued since."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._numbers, self._arrived = numbers, None
        if numbers.device.type == "cuda":
            self._numbers = numbers.to("cpu", non_blocking=True)  # to pinned memory
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def tolist(self) -> list[Any]:
        """The numbers, as nested lists."""
        if self._arrived is not None:
            self._arrived.synchronize()
        found: list[Any] = self._numbers.tolist()
        return found


def copy_to_buffer(buffer: torch.Tensor, values: Sequence[Any]) -> None:
    """Writes the numbers into a buffer on a device, in one copy."""
    tensor = torch.as_tensor(values, dtype=buffer.dtype, device="cpu")
    buffer.copy_(_pinned(tensor) if buffer.device.type == "cuda" else tensor, non_blocking=True)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    # torch refuses to pin one whose elements share memory, such as an expanded mask.
    return tensor.contiguous().pin_memory()
