"""Names of processors, for tables of costs."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def cpu_name() -> str:
    """Returns the processor's own name if Linux tells it, else what ``platform`` knows."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("model name", "Model")):
                return line.split(":", 1)[1].strip()
    except (OSError, IndexError):
        pass
    return platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """Returns a GPU's name, or the CPU's with the number of threads that torch uses."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{cpu_name()}, {torch.get_num_threads()} threads"
