"""Chooses the attention path (an implementation of tree attention) for a target. LONGDRAFT_ATTENTION forces a path.

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

logger = logging.getLogger("longdraft")

# The path that CUDA graphs can capture, because its kernels read slots and lengths on the device. It does not support
# sliding windows, soft caps, sinks, or values whose head size differs from the head size of the keys.
CAPTURABLE_PATH = "hybrid"
ENVIRONMENT_VARIABLE = "LONGDRAFT_ATTENTION"  # name of a path: forces it


def why_unavailable(path: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Returns why a path cannot run on a device, and what to do about it; None if it can."""
    if path == "cpu" and device.type != "cpu":
        return f"the cpu path runs on a CPU, the model is on {device}; try sdpa"
    if path == "hybrid":
        return hybrid.why_unavailable(device, dtype, head_dim)
    return None


def choose(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Returns the name of the path for queries of this device, dtype and head size.

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
    logger.warning("Attention runs on torch's masked kernels, which are slower than hybrid attention: %s.", reason)
    return "sdpa"


def resolve(device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[str, AttentionFunction]:
    """Chooses a path and logs its name. Returns the name, and the path's function."""
    path = choose(device, dtype, head_dim)
    logger.info("attention path: %s (%s, %s, head size %d)", path, device, dtype, head_dim)
    return path, PATHS[path]


PATHS: dict[str, AttentionFunction] = {
    "reference": reference.attend,
    "cpu": cpu.attend,
    "sdpa": sdpa.attend,
    "hybrid": hybrid.attend,
}


def prefers_transposed_keys(path: str, dtype: torch.dtype) -> bool:
    """True if the path is faster on keys that the KV store keeps transposed."""
    return path == "cpu" and dtype == torch.float32 and native.kernels() is not None
