"""Hybrid tree attention with flash-attn: its kernel over the prefix, the tree beside it, merged by log-sum-exp.

Two packages bring such kernels: ``flash_attn`` (version 2), and ``flash_attn_interface`` (version 3, for Hopper GPUs
alone). Of both, the function for caches is called: it reads which slots and how many rows each sequence has on the
device, cuts the keys for the whole GPU, and a chain's mask is aligned to the lower right.
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
    """Why it cannot run here, with what to do about it; None when it can."""
    name = package(device)
    if name is None:
        return (
            "flash-attn is not installed, or version 3 alone, which is for Hopper GPUs; `pip install flash-attn` "
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
    """The package to use on a device: version 3 where it is installed and made for the GPU, else version 2, or None."""
    installed = [name for name in (THREE, TWO) if importlib.util.find_spec(name) is not None]
    if THREE in installed and not _hopper(device):
        installed.remove(THREE)
    return installed[0] if installed else None


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block: Block, scale: float) -> torch.Tensor:
    """Same contract as :func:`longdraft.attention.hybrid.attend`; float16 and bfloat16 on a GPU."""
    return hybrid.attend(q, keys, values, block, scale, KERNELS)


def attend_prefix(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block: Block, scale: float
) -> torch.Tensor:
    """Same contract as :data:`longdraft.attention.prefix.PrefixAttend`."""
    return hybrid.attend_prefix(q, keys, values, block, scale, KERNELS)


def _hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _function(name: str) -> Callable[..., Any] | None:
    """A package's function; None where it is too old to return the log-sum-exp."""
    found: Callable[..., Any] | None = getattr(importlib.import_module(name), FUNCTION, None)
    return found if found is not None and "return_softmax_lse" in inspect.signature(found).parameters else None


@cache  # looking for a package takes long, and attention is called often
def _chosen(device: torch.device) -> Callable[..., Any]:
    name = package(device)
    found = None if name is None else _function(name)
    if found is None:
        raise CapabilityError("flash-attn is not installed, or not for this GPU; set LONGDRAFT_ATTENTION=hybrid.")
    return found


def _on_cache(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, places: Places, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """q (B, T, H, d), H a multiple of Hkv -> o like q, lse (B, H, T)."""
    # How keys are cut follows from the rows that a cache could have: no more than any sequence does.
    k, v = (x.narrow(2, 0, min(places.bound, x.shape[2])).transpose(1, 2) for x in (keys, values))
    found = _chosen(q.device)(
        q, k, v, cache_seqlens=places.lengths, cache_batch_idx=places.slots, softmax_scale=scale, causal=causal,
        return_softmax_lse=True,
    )  # fmt: skip
    return found[0], found[1]


def _prefix(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, places: Places, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, size, d = q.shape
    # Rows are handed over as heads, as to torch's kernel: the keys are then read once.
    o, lse = _on_cache(q.reshape(batch, 1, heads * size, d), keys, values, places, scale, False)
    return o.reshape(q.shape), lse.reshape(q.shape[:3])


def _causal(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, places: Places, scale: float) -> torch.Tensor:
    return _on_cache(q.transpose(1, 2), keys, values, places, scale, True)[0].transpose(1, 2)


KERNELS = Kernels(_prefix, _causal)
