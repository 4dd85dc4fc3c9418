"""Measures free and peak memory of this process and of a device, and checks that an allocation fits."""

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
    """An object that holds memory which it does not use at present."""

    def reclaim(self) -> bool:
        """Frees the unused memory. Returns True if there was unused memory."""


_THREAD_BYTES = 9 << 20  # address space of one thread: a stack, usually of 8 MiB, and other data
_MIN_PROCESS_BYTES = 32 << 20  # the least memory that a process needs to start
# Objects that are asked to free memory before an allocation is refused.
reclaimables: WeakSet[Reclaimable] = WeakSet()


def available_bytes(device: torch.device) -> int | None:
    """Returns the bytes that can still be allocated on ``device``; None if unknown."""
    if device.type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        # Memory that torch's allocator has reserved but does not use is available too, except in pools of CUDA graphs.
        index = torch.cuda.current_device() if device.index is None else device.index
        segments = torch.cuda.memory_snapshot() if torch.cuda.get_allocator_backend() == "native" else []
        default_pool = [
            s for s in segments if s["device"] == index and tuple(s.get("segment_pool_id", (0, 0))) == (0, 0)
        ]
        return int(free) + sum(segment["total_size"] - segment["allocated_size"] for segment in default_pool)
    return available_host_bytes() if device.type == "cpu" else None


def available_host_bytes() -> int:
    """Returns the bytes of host memory that this process can still allocate."""
    return min([int(psutil.virtual_memory().available), *_process_available(), *cgroup_available()])


def _process_available() -> Iterator[int]:
    """Yields the bytes that each limit of this process (``ulimit -v`` and ``-d``) leaves. The stacks of torch's threads
    are subtracted: OpenMP starts the threads at the first parallel kernel, and aborts if the stacks do not fit."""
    try:
        import resource
    except ImportError:  # Windows
        return
    used = psutil.Process().memory_info()
    for limit, used_bytes in ((resource.RLIMIT_AS, used.vms), (resource.RLIMIT_DATA, getattr(used, "data", 0))):
        allowed = resource.getrlimit(limit)[0]
        if allowed != resource.RLIM_INFINITY:
            import torch

            num_new_threads = torch.get_num_threads() - 1  # one of torch's threads is the main thread
            yield max(0, allowed - used_bytes - num_new_threads * _THREAD_BYTES)


def cgroup_available(file: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """Yields the bytes that each cgroup of this process (container, job, their parents) leaves. Page cache is free."""
    lines = file.read_text().splitlines() if file.is_file() else ["0::/"]
    for controllers, cgroup_path in (line.split(":", 2)[1:] for line in lines):
        is_cgroup_v1 = "memory" in controllers.split(",")
        if controllers and not is_cgroup_v1:
            continue
        root = mount / "memory" if is_cgroup_v1 else mount
        limit, usage = ("limit_in_bytes", "usage_in_bytes") if is_cgroup_v1 else ("max", "current")
        # In a container cgroup_path may be the host's path, which is not mounted. Its last parent is the mounted root.
        for path in (Path(cgroup_path.lstrip("/")), *Path(cgroup_path.lstrip("/")).parents):
            with suppress(OSError, ValueError):  # "max" means no limit
                allowed = int((root / path / f"memory.{limit}").read_text())
                used = int((root / path / f"memory.{usage}").read_text())
                stat = dict(line.split() for line in (root / path / "memory.stat").read_text().splitlines())
                names = (f"{'total_' if is_cgroup_v1 else ''}{state}_file" for state in ("inactive", "active"))
                yield max(0, allowed - used + sum(int(stat.get(name, 0)) for name in names))


def format_bytes(n: float) -> str:
    """Formats a number of bytes: ``1.5 KiB`` for 1536."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def require_bytes(needed: int, device: torch.device, purpose: str) -> None:
    """Raises MemoryBudgetError for ``purpose`` if ``needed`` bytes are not free even after :data:`reclaimables`."""
    available = available_bytes(device)
    if available is not None and needed > available:
        have_freed = [reclaimable.reclaim() for reclaimable in list(reclaimables)]
        if any(have_freed):
            available = available_bytes(device)
    if available is not None and needed > available:
        raise MemoryBudgetError(
            f"{purpose} needs {format_bytes(needed)} ({needed} bytes) on {device}, and {format_bytes(available)} "
            f"({available} bytes) are available. Shorten the prompt, lower the token budget or the batch, "
            "or load the model with dtype='bfloat16', which halves the cache."
        )


def check_process_limits() -> None:
    """Raises MemoryBudgetError if the limits of this process leave too little memory to begin."""
    if (left := min(_process_available(), default=_MIN_PROCESS_BYTES)) < _MIN_PROCESS_BYTES:
        raise MemoryBudgetError(f"This process's limits leave {format_bytes(left)} of memory: raise them (ulimit -v).")


def reset_peak(device: torch.device) -> bool:
    """Restarts the measurement of :func:`peak_bytes`. Returns False if the system cannot restart it."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: sets the peak to the present size of the resident set
    except OSError:
        return False
    return _peak_resident_bytes() is not None


def peak_bytes(device: torch.device) -> int:
    """Returns the peak bytes of torch's allocator (GPU) or of the process's resident set (CPU); 0 if unknown. The peak
    is measured since :func:`reset_peak`, or since the process began if :func:`reset_peak` returned False."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    if (peak := _peak_resident_bytes()) is not None:
        return peak
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, other systems KiB


def _peak_resident_bytes() -> int | None:
    """Returns the peak bytes of the resident set, without the parent's peak that ``getrusage`` includes; Linux only."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None
