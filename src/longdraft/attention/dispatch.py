"""Chooses the attention path, once per target. LONGDRAFT_ATTENTION forces one.

On a CPU these are our own kernels. On a GPU it is hybrid attention on torch's kernels; where that cannot run, torch's
SDPA with a mask.
"""

from __future__ import annotations

import logging
import os

import torch

from longdraft import native
from longdraft.attention import cpu, hybrid, reference, sdpa
from longdraft.attention.reference import AttentionFunction
from longdraft.errors import CapabilityError

log = logging.getLogger("longdraft")

# The path that CUDA graphs can capture: it reads only upper bounds from the host. It supports no sliding windows, soft
# caps, sinks, or values whose head size differs from the keys'.
CAPTURABLE_PATH = "hybrid"
ENVIRONMENT_VARIABLE = "LONGDRAFT_ATTENTION"


def unavailable(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Returns why a path cannot run here, and what to do about it; None if it can."""
    if name == "cpu" and device.type != "cpu":
        return f"the cpu path runs on a CPU, the model is on {device}; try sdpa"
    if name == "hybrid":
        return hybrid.unavailable(device, dtype, head_dim)
    return None


def choose(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Returns the name of the path to use on this machine.

    Raises:
        CapabilityError: LONGDRAFT_ATTENTION forces a path that cannot run here.
    """
    forced = os.environ.get(ENVIRONMENT_VARIABLE)
    if forced:
        if forced not in PATHS:
            raise CapabilityError(f"{ENVIRONMENT_VARIABLE}={forced} is not one of {', '.join(PATHS)}.")
        reason = unavailable(forced, device, dtype, head_dim)
        if reason is not None:
            raise CapabilityError(f"{ENVIRONMENT_VARIABLE}={forced} cannot run: {reason}.")
        return forced
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        return "sdpa"
    if (reason := hybrid.unavailable(device, dtype, head_dim)) is None:
        return "hybrid"
    log.warning("Attention runs on torch's masked kernels, which read more than they need: %s.", reason)
    return "sdpa"


def resolve(device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[str, AttentionFunction]:
    """Chooses a path, logs its name, and returns the name and the function."""
    name = choose(device, dtype, head_dim)
    log.info("attention path: %s (%s, %s, head size %d)", name, device, dtype, head_dim)
    return name, PATHS[name]


PATHS: dict[str, AttentionFunction] = {
    "reference": reference.attend,
    "cpu": cpu.attend,
    "sdpa": sdpa.attend,
    "hybrid": hybrid.attend,
}


def prefers_transposed_keys(path: str, dtype: torch.dtype) -> bool:
    """True if the KV store should keep keys transposed: our kernels multiply faster then."""
    return path == "cpu" and dtype == torch.float32 and native.kernels() is not None
