"""Chooses the attention path, once per target. LONGDRAFT_ATTENTION forces one.

On a CPU the path is our own. On a GPU it is hybrid attention on torch's kernels. On an H100 and an H200 it is as fast
as our Triton kernels in a drafted round, and faster for wide trees behind long texts (docs/gpu.md). Where it cannot
run, torch's masked kernels do. Keys and values in eight bits are read by Triton.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os

import torch

from longdraft import native
from longdraft.attention import hybrid, sdpa
from longdraft.attention.block import PLAIN, Block, Scoring
from longdraft.attention.reference import Attend
from longdraft.errors import CapabilityError

log = logging.getLogger("longdraft")

PATHS = {
    "reference": "longdraft.attention.reference",
    "cpu": "longdraft.attention.cpu",
    "sdpa": "longdraft.attention.sdpa",
    "hybrid": "longdraft.attention.hybrid",
    "triton": "longdraft.attention.triton_backend",
}
# The paths that compute windows, soft caps and sinks themselves.
SERVE_WINDOWS = ("reference", "cpu", "sdpa", "triton")
# Those of them that also take values of another head size than the keys'.
SERVE_ALL = ("reference", "cpu", "sdpa")
# The paths that read only bounds from the host, so that a forward can be recorded.
CAPTURABLE = ("hybrid", "triton")
ENVIRONMENT = "LONGDRAFT_ATTENTION"


def unavailable(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """The reason why a path cannot run here, and what to do about it; None if it can."""
    if name == "cpu" and device.type != "cpu":
        return f"the cpu path runs on a CPU, the model is on {device}; try sdpa"
    if name == "hybrid":
        return hybrid.unavailable(device, dtype, head_dim)
    if name == "triton":
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed; `pip install longdraft[gpu]`"
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return f"triton needs a GPU, the model is on {device} (TRITON_INTERPRET=1 emulates it, very slowly)"
        if head_dim > 256:
            return f"the triton kernel supports head sizes up to 256, this model's is {head_dim}"
    return None


def scaled_unavailable(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """The reason why no path on a GPU reads keys and values in eight bits; None if Triton does."""
    if device.type != "cuda" or dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the kernels for it are for float32, float16 and bfloat16 on a GPU, the model is {dtype} on {device}"
    forced = os.environ.get(ENVIRONMENT) or "triton"
    if forced != "triton":
        return f"{ENVIRONMENT}={forced} forces a path that reads the model's own dtype"
    return unavailable("triton", device, dtype, head_dim)


def choose(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """The name of the path to use on this machine.

    Raises:
        CapabilityError: LONGDRAFT_ATTENTION forces a path that cannot run here.
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
    if device.type != "cuda":
        return "sdpa"
    if (reason := hybrid.unavailable(device, dtype, head_dim)) is None:
        return "hybrid"
    log.warning("Attention runs on torch's masked kernels, which read more than they need: %s.", reason)
    return "sdpa"


def resolve(device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[str, Attend]:
    """Chooses a path, logs its name, and returns the name and the function."""
    name = choose(device, dtype, head_dim)
    log.info("attention path: %s (%s, %s, head size %d)", name, device, dtype, head_dim)
    attend: Attend = importlib.import_module(PATHS[name]).attend
    return name, attend if name in SERVE_ALL else _with_fallback(name, attend)


def _with_fallback(name: str, attend: Attend) -> Attend:
    """A path whose kernels do not serve all layers, with windows, soft caps, sinks or values of another head size than
    the keys': the others are computed by torch's masked kernels."""
    windows = name in SERVE_WINDOWS

    def each_layer(
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        block: Block,
        scale: float,
        scoring: Scoring = PLAIN,
        /,
    ) -> torch.Tensor:
        if keys.shape[3] == values.shape[3]:
            if windows:
                return attend(q, keys, values, block, scale, scoring)
            if block.begins is None and scoring is PLAIN:
                return attend(q, keys, values, block, scale)
        _say_once(name)
        return sdpa.attend(q, keys, values, block, scale, scoring)

    return each_layer


@functools.cache
def say_scaled(path: str) -> None:
    """Says once that another path than the target's reads keys and values in eight bits."""
    if path != "triton":
        log.info("attention path of keys and values in int8: triton, as %s reads the model's own dtype", path)


@functools.cache
def _say_once(name: str) -> None:
    kinds = "values narrower than keys" if name in SERVE_WINDOWS else "a window, a soft cap or sinks"
    log.warning("Layers with %s are computed by torch's masked kernels, not by %s.", kinds, name)


def prefers_transposed_keys(path: str, dtype: torch.dtype) -> bool:
    """True if the store should keep keys column-wise for this path: our kernels multiply faster with them."""
    return path == "cpu" and dtype == torch.float32 and native.kernels() is not None
