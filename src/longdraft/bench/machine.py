"""Describes this machine for reports and ``longdraft doctor``."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import psutil
import torch

from longdraft.memory import memory_info
from longdraft.planning.costs import cpu_name

PACKAGES = ("longdraft", "torch", "transformers", "triton")


def hardware() -> dict[str, Any]:
    """Processor, cores, memory and GPUs. A value that the system does not report is None."""
    gpus = []
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        name = torch.cuda.get_device_properties(i).name
        gpus.append({"name": name, "memory_bytes": total, "memory_available_bytes": free})
    # A container may allow fewer cores than the machine has.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "cpu": cpu_name(),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "memory_available_bytes": memory_info.available_bytes(torch.device("cpu")),
        "gpus": gpus,
    }


def versions() -> dict[str, str | None]:
    """Versions of Python and of :data:`PACKAGES`; None for a package that is not installed."""
    installed: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            installed[package] = None
    return installed


def environment() -> dict[str, Any]:
    """Returns the entries of a report's JSON object that describe the machine and the versions."""
    return {"hardware": hardware(), "versions": versions()}
