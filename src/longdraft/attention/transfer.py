"""Numbers from the host to the device, without waiting for the device.

``torch.tensor(numbers, device="cuda")`` copies from pageable memory, and the host then waits for all that the device
has been asked to compute. From pinned memory the copy queues behind it, and the host goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def on_device(
    numbers: Sequence[Any] | torch.Tensor, device: torch.device | str, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The numbers as a tensor on the device.

    Args:
        numbers: nested lists, or a tensor, which may be there already.
        dtype: of the result; None: as ``torch.as_tensor`` makes it.
    """
    where = torch.device(device)
    found = torch.as_tensor(numbers, dtype=dtype)
    if where.type == "cuda" and found.device.type == "cpu":
        return found.pin_memory().to(where, non_blocking=True)
    return found.to(where)
