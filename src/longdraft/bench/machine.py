"""Describes this machine for reports and ``longdraft doctor``, and measures a run's peak memory."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import psutil
import torch

from longdraft.memory import sizes
from longdraft.planning.costs import cpu_name

PACKAGES = ("longdraft", "torch", "transformers", "triton")


def hardware() -> dict[str, Any]:
    """Processor, cores, memory in bytes and GPUs; None for an entry that the system does not tell."""
    gpus = []
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        name = torch.cuda.get_device_properties(i).name
        gpus.append({"name": name, "memory_bytes": total, "memory_available_bytes": free})
    # In a container a process may use fewer cores than the machine has.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "cpu": cpu_name(),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "memory_available_bytes": sizes.available_bytes(torch.device("cpu")),
        "gpus": gpus,
    }


def versions() -> dict[str, str | None]:
    """Python's version and that of each package that matters; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def forget_peak(device: torch.device) -> bool:
    """Restarts the measurement of :func:`peak_bytes`; False if the system cannot."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak resident set becomes the present one
    except OSError:
        return False
    return _peak_resident() is not None


def peak_bytes(device: torch.device) -> int | None:
    """Peak memory since :func:`forget_peak`: torch's allocator on a GPU, else the process's resident set."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _peak_resident()


def _peak_resident() -> int | None:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None
