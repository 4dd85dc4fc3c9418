"""Hybrid tree attention with flash-attn: its kernel over the prefix, the tree beside it, merged by log-sum-exp.

Two packages have such kernels: ``flash_attn`` (version 2) and ``flash_attn_interface`` (version 3, for Hopper GPUs
only). longdraft calls their function for caches: it reads slots and lengths on the device, splits the keys over the
whole GPU, and aligns a chain's mask to the lower right.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from longdraft.attention import hybrid
from longdraft.attention.block import Block
from longdraft.attention.hybrid import Kernels, Places
from longdraft.errors import CapabilityError

TWO, THREE = "flash_attn", "flash_attn_interface"
FUNCTION = "flash_attn_with_kvcache"


def unavailable(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """The reason why flash-attn cannot run here, and what to do about it; None if it can."""
    name = package(device)
    if name is None:
        return (
            "flash-attn is not installed, or only version 3, which needs a Hopper GPU; `pip install flash-attn` "
            "on a machine with an NVIDIA GPU"
        )
    if device.type != "cuda":
        return f"flash-attn needs an NVIDIA GPU, the model is on {device}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"flash-attn works in float16 and bfloat16, the model is {dtype}; load it with dtype='bfloat16'"
    if head_dim > hybrid.MAX_HEAD_DIM or head_dim % 8:
        return f"flash-attn takes head sizes up to 256 that are multiples of 8, this model's is {head_dim}"
    if _function(name) is None:
        return f"the installed {name} gives no log-sum-exp, which a tree's attention needs; install a newer one"
    return None


def package(device: torch.device) -> str | None:
    """The package to use on a device: version 3 on a Hopper GPU, else version 2; None if it is not installed."""
    installed = [name for name in (THREE, TWO) if importlib.util.find_spec(name) is not None]
    if THREE in installed and not _hopper(device):
        installed.remove(THREE)
    return installed[0] if installed else None


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block: Block, scale: float) -> torch.Tensor:
    """Same contract as :func:`longdraft.attention.hybrid.attend`; float16 and bfloat16 on a GPU."""
    return hybrid.attend(q, keys, values, block, scale, kernels=KERNELS)


def attend_prefix(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block: Block, scale: float
) -> torch.Tensor:
    """Same contract as :data:`longdraft.attention.prefix.PrefixAttend`."""
    return hybrid.attend_prefix(q, keys, values, block, scale, KERNELS)


def _hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _function(name: str) -> Callable[..., Any] | None:
    """A package's function for caches; None if it is too old to return the log-sum-exp."""
    function: Callable[..., Any] | None = getattr(importlib.import_module(name), FUNCTION, None)
    known = function is not None and "return_softmax_lse" in inspect.signature(function).parameters
    return function if known else None


@cache  # looking for a package takes long, and attention is called often
def _chosen(device: torch.device) -> Callable[..., Any]:
    name = package(device)
    function = None if name is None else _function(name)
    if function is None:
        raise CapabilityError("flash-attn is not installed, or not for this GPU; set LONGDRAFT_ATTENTION=hybrid.")
    return function


def _on_cache(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, places: Places, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """q (B, T, H, d), H a multiple of Hkv -> o like q, lse (B, H, T)."""
    # The kernel splits keys by the capacity of the cache, so the cache is narrowed to the longest sequence.
    k, v = (x.narrow(2, 0, min(places.bound, x.shape[2])).transpose(1, 2) for x in (keys, values))
    results = _chosen(q.device)(
        q, k, v, cache_seqlens=places.lengths, cache_batch_idx=places.slots, softmax_scale=scale, causal=causal,
        return_softmax_lse=True,
    )  # fmt: skip
    return results[0], results[1]


def _prefix(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, places: Places, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, size, d = q.shape
    # Rows are passed as heads, as to torch's kernel, so that the keys are read once.
    o, lse = _on_cache(q.reshape(batch, 1, heads * size, d), keys, values, places, scale, False)
    return o.reshape(q.shape), lse.reshape(q.shape[:3])


def _causal(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, places: Places, scale: float) -> torch.Tensor:
    return _on_cache(q.transpose(1, 2), keys, values, places, scale, True)[0].transpose(1, 2)


KERNELS = Kernels(_prefix, _causal)
