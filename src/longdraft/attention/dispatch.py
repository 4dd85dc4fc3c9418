"""Chooses the attention path (an implementation of tree attention) of a target. LONGDRAFT_ATTENTION forces a path.

A CPU uses our own kernels ("cpu"). A GPU uses hybrid attention on torch's kernels ("hybrid"), or, where hybrid cannot
run, torch's SDPA with a mask ("sdpa").
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

# The path that CUDA graphs can capture, because it reads only upper bounds from the host. It does not support sliding
# windows, soft caps, sinks, or values whose head size differs from that of the keys.
CAPTURABLE_PATH = "hybrid"
ENVIRONMENT_VARIABLE = "LONGDRAFT_ATTENTION"


def why_unavailable(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Returns why a path cannot run here, and what to do about it; None if it can."""
    if name == "cpu" and device.type != "cpu":
        return f"the cpu path runs on a CPU, the model is on {device}; try sdpa"
    if name == "hybrid":
        return hybrid.why_unavailable(device, dtype, head_dim)
    return None


def choose(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Returns the name of the path for tensors of this kind.

    Raises:
        CapabilityError: LONGDRAFT_ATTENTION forces a path that cannot run here.
    """
    forced = os.environ.get(ENVIRONMENT_VARIABLE)
    if forced:
        if forced not in PATHS:
            raise CapabilityError(f"{ENVIRONMENT_VARIABLE}={forced} is not one of {', '.join(PATHS)}.")
        reason = why_unavailable(forced, device, dtype, head_dim)
        if reason is not None:
            raise CapabilityError(f"{ENVIRONMENT_VARIABLE}={forced} cannot run: {reason}.")
        return forced
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        return "sdpa"
    if (reason := hybrid.why_unavailable(device, dtype, head_dim)) is None:
        return "hybrid"
    log.warning("Attention runs on torch's masked kernels, which are slower than hybrid attention: %s.", reason)
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
    """True if the KV store should keep keys transposed, which makes our kernels faster."""
    return path == "cpu" and dtype == torch.float32 and native.kernels() is not None
