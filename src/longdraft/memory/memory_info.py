"""The memory that is free, and checks that a request fits it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

import psutil

from longdraft.errors import MemoryBudgetError

if TYPE_CHECKING:
    import torch


class Reclaimable(Protocol):
    """Holds memory that is not in use."""

    def reclaim(self) -> bool:
        """Frees it, and returns whether there was any."""


# Bytes of a thread's stack and what is beside it, as systems have it by default, and of what nothing begins without.
_STACK, _LEAST = 9 << 20, 32 << 20
# They free their memory before a request is refused.
reclaimables: WeakSet[Reclaimable] = WeakSet()


def available_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on ``device``; None if the system does not say."""
    if device.type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        # Memory that torch's allocator holds but does not use is available too.
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return available_host_bytes() if device.type == "cpu" else None


def available_host_bytes() -> int:
    """Bytes of this machine's memory that this process can still have."""
    return min([int(psutil.virtual_memory().available), *_process_available(), *cgroup_available()])


def _process_available() -> Iterator[int]:
    """Bytes that the limits of this process leave (``ulimit -v`` and ``-d``) beside the stacks of torch's threads:
    OpenMP, which starts them at their first work, ends a process that has no room for them."""
    try:
        import resource
    except ImportError:  # Windows
        return
    used = psutil.Process().memory_info()
    for limit, size in ((resource.RLIMIT_AS, used.vms), (resource.RLIMIT_DATA, getattr(used, "data", 0))):
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            import torch

            yield max(0, most - size - (torch.get_num_threads() - 1) * _STACK)


def cgroup_available(
    cgroup_file: Path = Path("/proc/self/cgroup"), mount_point: Path = Path("/sys/fs/cgroup")
) -> Iterator[int]:
    """Bytes that the cgroups of this process leave: the container's or job's, and those around. Page cache is free."""
    lines = cgroup_file.read_text().splitlines() if cgroup_file.is_file() else ["0::/"]
    for kinds, place in (line.split(":", 2)[1:] for line in lines):
        old = "memory" in kinds.split(",")  # version 1
        if kinds and not old:
            continue
        root = mount_point / "memory" if old else mount_point
        limit, use = ("limit_in_bytes", "usage_in_bytes") if old else ("max", "current")
        # In a container the path can be the host's, of which there is only the root.
        for path in (Path(place.lstrip("/")), *Path(place.lstrip("/")).parents):
            with suppress(OSError, ValueError):  # "max" is no limit
                most = int((root / path / f"memory.{limit}").read_text())
                used = int((root / path / f"memory.{use}").read_text())
                stat = dict(line.split() for line in (root / path / "memory.stat").read_text().splitlines())
                files = (int(stat.get(f"{'total_' if old else ''}{kind}_file", 0)) for kind in ("inactive", "active"))
                yield max(0, most - used + sum(files))


def format_bytes(n: float) -> str:
    """``1536`` -> ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def require_bytes(needed: int, device: torch.device, purpose: str) -> None:
    """Raises MemoryBudgetError, with the bytes needed and available, if ``needed`` bytes are not available."""
    available = available_bytes(device)
    if available is not None and needed > available:
        freed = [each.reclaim() for each in list(reclaimables)]
        if any(freed):
            available = available_bytes(device)
    if available is not None and needed > available:
        raise MemoryBudgetError(
            f"{purpose} needs {format_bytes(needed)} ({needed} bytes) on {device}, and {format_bytes(available)} "
            f"({available} bytes) are available. Shorten the prompt, lower the token budget or the batch, "
            f"or load the model with dtype='bfloat16', which halves the cache."
        )


def check_process_limits() -> None:
    """Raises MemoryBudgetError if the limits of this process leave no room to begin."""
    if (left := min(_process_available(), default=_LEAST)) < _LEAST:
        raise MemoryBudgetError(
            f"The limits of this process leave {format_bytes(left)} of memory: raise them (ulimit -v)."
        )


def reset_peak(device: torch.device) -> bool:
    """Restarts the measurement of :func:`peak_bytes`; False if the system cannot."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak resident set becomes the present one
    except OSError:
        return False
    return _high_water() is not None


def peak_bytes(device: torch.device) -> int:
    """Peak memory of this process, since :func:`reset_peak` if that could be called: of torch's allocator on a GPU,
    its resident set on a CPU; 0 if unknown."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    if (peak := _high_water()) is not None:
        return peak
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _high_water() -> int | None:
    """Linux's own peak of the resident set; ``getrusage`` has that of the process that started this one in it."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None
