"""Chooses the attention path, once per target. LONGDRAFT_ATTENTION forces one.

On a CPU the path is our own. On a GPU it is hybrid attention on torch's kernels, and where that cannot run, torch's
masked kernels.
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

# The path that reads only bounds from the host, so that a forward can be recorded. It takes no windows, soft caps,
# sinks, or values of another head size than the keys'.
CAPTURABLE_PATH = "hybrid"
ENVIRONMENT_VARIABLE = "LONGDRAFT_ATTENTION"


def unavailable(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """The reason why a path cannot run here, and what to do about it; None if it can."""
    if name == "cpu" and device.type != "cpu":
        return f"the cpu path runs on a CPU, the model is on {device}; try sdpa"
    if name == "hybrid":
        return hybrid.unavailable(device, dtype, head_dim)
    return None


def choose(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """The name of the path to use on this machine.

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
    """True if the store should keep keys column-wise for this path: our kernels multiply faster with them."""
    return path == "cpu" and dtype == torch.float32 and native.kernels() is not None
