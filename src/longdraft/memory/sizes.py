"""The memory that is free, and checks that a request fits it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

import psutil

from longdraft.errors import MemoryBudgetError

if TYPE_CHECKING:
    import torch


class Spare(Protocol):
    """Holds memory that is not in use."""

    def drop(self) -> bool:
        """Frees it, and returns whether there was any."""


# They free their memory before a request is refused.
spare: WeakSet[Spare] = WeakSet()


def available_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on ``device``; None if the system does not say."""
    if device.type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        # Memory that torch's allocator holds but does not use is available too.
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "cpu":
        free, limit = int(psutil.virtual_memory().available), _cgroup_available()
        return free if limit is None else min(free, limit)
    return None


def _cgroup_available() -> int | None:
    """A container's memory limit minus its use (cgroup v2). Page cache counts as free."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        return int(limit) - used + int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
    except (OSError, ValueError):
        return None


def human(n: float) -> str:
    """``1536`` -> ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def require(needed: int, device: torch.device, what: str) -> None:
    """Raises MemoryBudgetError, with the bytes needed and available, if ``needed`` bytes are not available."""
    available = available_bytes(device)
    if available is not None and needed > available:
        freed = [each.drop() for each in list(spare)]
        if any(freed):
            available = available_bytes(device)
    if available is not None and needed > available:
        raise MemoryBudgetError(
            f"{what} needs {human(needed)} ({needed} bytes) on {device}, and {human(available)} "
            f"({available} bytes) are available. Shorten the prompt, lower the token budget or the batch, "
            f"or load the model with dtype='bfloat16', which halves the cache."
        )


def peak_bytes(device: torch.device) -> int:
    """Peak memory so far: of torch's allocator on a GPU, of the process on a CPU; 0 if unknown."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
