"""The first stage of benchmarks/gpu.py, the header of all results, and the check that the GPU still works."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import kernel_timing
import torch
from gpu_common import can_be_recorded, device_of, environment, half_of, short, sizes_of
from gpu_results import Rows, Skipped, Stage

from longdraft.attention import dispatch
from longdraft.bench import machine
from longdraft.errors import CapabilityError
from longdraft.memory import sizes
from longdraft.model import graphs


class Peak(NamedTuple):
    """Bytes a second of memory and dense bfloat16 operations a second, as the vendor states them."""

    bandwidth: float
    operations: float


# By what torch calls the GPU. An H100 without HBM3 in its name is another card, with less of both.
PEAKS = {
    "NVIDIA H100 80GB HBM3": Peak(3.35e12, 989e12),
    "NVIDIA H200": Peak(4.8e12, 989e12),
    "NVIDIA A100-SXM4-80GB": Peak(2.04e12, 312e12),
}


def peak(device: torch.device) -> Peak | None:
    """The vendor's figures for this GPU; None if it is not in :data:`PEAKS`."""
    return PEAKS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def header(options: argparse.Namespace) -> dict[str, Any]:
    """Device, driver, processor, versions and commit of this process's measurements."""
    gpus = machine.hardware()["gpus"]
    versions = machine.versions() | {"cuda": torch.version.cuda}
    return {
        "device": f"{gpus[0]['name']}, {sizes.human(gpus[0]['memory_bytes'])}" if gpus else "CPU",
        "driver": _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpus else None,
        "processor": f"{machine.hardware()['cpu']}, {machine.hardware()['cores']} cores",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Commit of this checkout, marked if files differ from it; None outside a checkout."""
    folder = str(Path(__file__).parent)
    commit = _output_of("git", "-C", folder, "rev-parse", "--short=12", "HEAD")
    changed = commit and _output_of("git", "-C", folder, "status", "--porcelain", "--untracked-files=no")
    return f"{commit} and changes" if changed else commit


def _output_of(*command: str) -> str | None:
    """The output of a program; None if it is missing, fails or prints nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 and done.stdout.strip() else None


def healthy(options: argparse.Namespace) -> bool:
    """True if this process can still use its GPU."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        return bool(torch.ones(1, device="cuda").item() == 1)
    except Exception:
        return False


def environment_rows(values: dict[str, Any]) -> Rows:
    return [{"what": "environment", "name": name, "value": value} for name, value in values.items()]


def environment_stage(stage: Stage, options: argparse.Namespace) -> None:
    """Measures the machine: hardware, attention paths, copy bandwidth."""
    device, sizes = device_of(), sizes_of(options)
    stage.measure("machine", lambda: environment_rows(_machine(device)))
    for dtype in dict.fromkeys((half_of(device), torch.float32)):
        stage.measure(f"attention paths, {short(dtype)}", lambda dtype=dtype: _paths(device, dtype, sizes.head_dim))
    stage.measure("copy bandwidth", lambda: _bandwidth(device))


def _machine(device: torch.device) -> dict[str, Any]:
    hardware = machine.hardware()
    found: dict[str, Any] = {"processor": f"{hardware['cpu']}, {hardware['cores']} cores"}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "GPU": properties.name,
            "GPU memory": sizes.human(properties.total_memory),
            "GPU memory free": sizes.human(hardware["gpus"][0]["memory_available_bytes"]),
            "compute capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
        }
        query = "driver_version,power.limit,clocks.max.sm,clocks.max.mem,mig.mode.current"
        output = _output_of("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")
        if output is not None:
            names = ("driver", "power limit", "largest clock", "largest memory clock", "MIG")
            found |= dict(zip(names, output.splitlines()[0].split(", "), strict=False))
    return found


def _paths(device: torch.device, dtype: torch.dtype, head_dim: int) -> Rows:
    """The attention paths that run, with or without graphs, reasons for those that do not, and the chosen one."""
    found: dict[str, Any] = {}
    label = f"{short(dtype)}, head size {head_dim}"
    for name in dispatch.PATHS:
        why_not = dispatch.unavailable(name, device, dtype, head_dim)
        runs = "runs, with graphs" if can_be_recorded(name, device) else "runs"
        found[f"{name}, {label}"] = runs if why_not is None else f"cannot run: {why_not}"
    try:
        with environment(**{dispatch.ENVIRONMENT: None, graphs.SWITCH: None}):
            found[f"chosen, {label}"] = dispatch.choose(device, dtype, head_dim)
    except CapabilityError as error:
        found[f"chosen, {label}"] = f"none: {error}"
    return environment_rows(found)


def _bandwidth(device: torch.device) -> Rows:
    if device.type != "cuda":
        raise Skipped("it is measured on a GPU alone")
    measured, stated = kernel_timing.copy_bandwidth(), peak(device)
    text = f"{measured / 1e12:.2f} TB/s"
    if stated is not None:
        text += f", {measured / stated.bandwidth:.0%} of the {stated.bandwidth / 1e12:.2f} that the vendor states"
    return [{"what": "environment", "name": "copy bandwidth", "value": text, "bytes_per_second": measured}]
