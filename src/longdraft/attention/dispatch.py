"""Which attention path runs: chosen once per target, logged, and forced with LONGDRAFT_ATTENTION."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable

import torch

from longdraft.attention import flash
from longdraft.attention.block import Block
from longdraft.errors import CapabilityError

log = logging.getLogger("longdraft")

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Block, float], torch.Tensor]

PATHS = {
    "reference": "longdraft.attention.reference",
    "cpu": "longdraft.attention.cpu",
    "sdpa": "longdraft.attention.sdpa",
    "flash": "longdraft.attention.flash",
    "triton": "longdraft.attention.triton_backend",
}
ENVIRONMENT = "LONGDRAFT_ATTENTION"


def unavailable(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why a path cannot run here, with what to do about it; None when it can."""
    if name == "cpu" and device.type != "cpu":
        return f"the cpu path runs on a CPU, the model is on {device}; try sdpa"
    if name == "flash":
        if flash.package(device) is None:
            return (
                "flash-attn is not installed, or version 3 alone, which is for Hopper GPUs; `pip install flash-attn` "
                "on a machine with an NVIDIA GPU"
            )
        if device.type != "cuda":
            return f"flash-attn needs an NVIDIA GPU, the model is on {device}"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"flash-attn works in float16 and bfloat16, the model is {dtype}; load it with dtype='bfloat16'"
        if head_dim > 256:
            return f"flash-attn supports head sizes up to 256, this model's is {head_dim}"
    if name == "triton":
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed; `pip install longdraft[gpu]`"
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return f"triton needs a GPU, the model is on {device} (TRITON_INTERPRET=1 emulates it, very slowly)"
        if head_dim > 256:
            return f"the triton kernel supports head sizes up to 256, this model's is {head_dim}"
    return None


def choose(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """The name of the path to use on this machine.

    Raises:
        CapabilityError: when LONGDRAFT_ATTENTION forces a path that cannot run here.
    """
    forced = os.environ.get(ENVIRONMENT)
    if forced:
        if forced not in PATHS:
            raise CapabilityError(f"{ENVIRONMENT}={forced} is not one of {', '.join(PATHS)}.")
        reason = unavailable(forced, device, dtype, head_dim)
        if reason is not None:
            raise CapabilityError(f"{ENVIRONMENT}={forced} cannot run: {reason}.")
        return forced
    if device.type == "cpu":
        return "cpu"
    # The Triton path is taken on request until its figures on a GPU stand in docs/benchmarks.md.
    return "flash" if unavailable("flash", device, dtype, head_dim) is None else "sdpa"


def resolve(device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[str, Attend]:
    """The chosen path and its function; logged once per call, so once per target."""
    name = choose(device, dtype, head_dim)
    log.info("attention path: %s (%s, %s, head size %d)", name, device, dtype, head_dim)
    attend: Attend = importlib.import_module(PATHS[name]).attend
    return name, attend


def prefers_transposed_keys(path: str, dtype: torch.dtype) -> bool:
    """Whether the store should keep keys column-wise for this path (see :mod:`longdraft.attention.cpu`)."""
    return path == "cpu" and dtype == torch.float32
