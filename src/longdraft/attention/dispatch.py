"""Chooses the attention path (an implementation of tree attention) for a target. LONGDRAFT_ATTENTION forces a path,
LONGDRAFT_PREFILL_ATTENTION another one for prompts, and LONGDRAFT_FUSION=off leaves out fused layers and CUDA graphs.

A CPU uses our own kernels ("cpu"). A GPU uses hybrid attention on torch's kernels ("hybrid"), or, where hybrid cannot
run, torch's SDPA with a mask ("sdpa").
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from longdraft import native
from longdraft.attention import cpu, hybrid, reference, sdpa
from longdraft.attention.forward_batch import ForwardBatch
from longdraft.attention.reference import AttentionFunction
from longdraft.errors import CapabilityError

logger = logging.getLogger("longdraft")

# The path that CUDA graphs can capture, because its kernels read slots and lengths on the device. It does not support
# sliding windows, soft caps, sinks, or values whose head size differs from the head size of the keys.
CAPTURABLE_PATH = "hybrid"
ENVIRONMENT_VARIABLE = "LONGDRAFT_ATTENTION"  # name of a path: forces it
PREFILL_VARIABLE = "LONGDRAFT_PREFILL_ATTENTION"  # the same, for prompts alone
FUSION_VARIABLE = "LONGDRAFT_FUSION"  # off: layers run one by one, with their own code
DEFAULT = "default"  # as the name of a path: the one that is chosen where nothing is forced


def why_unavailable(path: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Returns why a path cannot run on a device, and what to do about it; None if it can."""
    if path == "cpu" and device.type != "cpu":
        return f"the cpu path runs on a CPU, the model is on {device}; try sdpa"
    if path == "hybrid":
        return hybrid.why_unavailable(device, dtype, head_dim)
    return None


def choose(device: torch.device, dtype: torch.dtype, head_dim: int, variable: str = ENVIRONMENT_VARIABLE) -> str:
    """Returns the name of the path for queries of this device, dtype and head size. ``variable`` may force one.

    Raises:
        CapabilityError: the environment forces a path that cannot run here.
    """
    forced = os.environ.get(variable)
    if forced and forced != DEFAULT:
        if forced not in PATHS:
            raise CapabilityError(f"{variable}={forced} is not one of {', '.join(PATHS)}.")
        reason = why_unavailable(forced, device, dtype, head_dim)
        if reason is not None:
            raise CapabilityError(f"{variable}={forced} cannot run: {reason}.")
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
    """Chooses a path and logs its name. Returns the name, and the path's function: for prompts that of another path,
    if one is forced for them."""
    path = choose(device, dtype, head_dim)
    prefill_path = choose(device, dtype, head_dim, PREFILL_VARIABLE) if os.environ.get(PREFILL_VARIABLE) else path
    logger.info(
        "attention path: %s, for prompts %s (%s, %s, head size %d)", path, prefill_path, device, dtype, head_dim
    )
    if prefill_path == path:
        return path, PATHS[path]
    attend, attend_prompt = PATHS[path], PATHS[prefill_path]

    def attend_by_phase(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        return (attend_prompt if batch.is_prefill else attend)(q, k, v, batch, *args, **kwargs)

    return path, attend_by_phase


def allows_fusion(device: torch.device, path: str) -> bool:
    """True if fused layers and CUDA graphs may run. On a CPU fused layers compute attention too, as ``path`` "cpu"."""
    computes_path = device.type != "cpu" or (path == "cpu" and not os.environ.get(PREFILL_VARIABLE))
    return computes_path and os.environ.get(FUSION_VARIABLE) != "off"


PATHS: dict[str, AttentionFunction] = {
    "reference": reference.attend,
    "cpu": cpu.attend,
    "sdpa": sdpa.attend,
    "hybrid": hybrid.attend,
}


def prefers_transposed_keys(path: str, dtype: torch.dtype) -> bool:
    """True if the path is faster on keys that the KV store keeps transposed."""
    return path == "cpu" and dtype == torch.float32 and native.kernels() is not None
