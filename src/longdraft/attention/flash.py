"""Hybrid tree attention with flash-attn: its kernel over the prefix, the tree part beside it, merged by LSE.

Two packages bring such kernels: ``flash_attn`` (version 2), and ``flash_attn_interface`` (version 3, for Hopper GPUs
alone), which takes other options and has returned the log-sum-exp in different ways.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from longdraft.attention.block import Block
from longdraft.attention.reference import merge, partial_attention
from longdraft.errors import CapabilityError

TWO, THREE = "flash_attn", "flash_attn_interface"
# Looking for a package takes long, and attention is called often.
_chosen: dict[torch.device, str] = {}


def package(device: torch.device) -> str | None:
    """The package to use on a device: version 3 where it is installed and made for the GPU, else version 2, or None."""
    installed = [name for name in (THREE, TWO) if importlib.util.find_spec(name) is not None]
    if THREE in installed and not _hopper(device):
        installed.remove(THREE)
    return installed[0] if installed else None


def _hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block: Block, scale: float) -> torch.Tensor:
    """Same contract as :func:`longdraft.attention.reference.attend`; float16 and bfloat16 on a GPU."""
    out = torch.empty_like(q)
    for b, (slot, n) in enumerate(zip(block.slots, block.lengths, strict=True)):
        end = n + block.width
        k, v = keys[slot, :, :end], values[slot, :, :end]
        if block.mask is None:
            # flash-attn aligns its causal mask to the lower right: a chain behind a prefix is one call.
            out[b] = whole(q[b], k, v, scale, causal=True)
            continue
        tree, tree_lse = partial_attention(q[b], k[:, n:], v[:, n:], scale, block.mask[b])
        if n == 0:
            out[b] = tree.to(q.dtype)
            continue
        o, _ = merge(*zip(_with_lse(q[b], k[:, :n], v[:, :n], scale), (tree, tree_lse), strict=True))
        out[b] = o.to(q.dtype)
    return out


def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    """q (Hq, T, d) on k, v (Hkv, n, d) -> (Hq, T, d). causal: the last row sees all, the one before it one less."""
    function, options, _ = _entry(*_named(q.device))
    found = function(*_rows(q, k, v), softmax_scale=scale, causal=causal, **options)
    out: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return out[0].transpose(0, 1)


def _with_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row on all keys: output (Hq, T, d) and log-sum-exp (Hq, T)."""
    function, options, asked = _entry(*_named(q.device))
    found = function(*_rows(q, k, v), softmax_scale=scale, causal=False, **options, **asked)
    if not isinstance(found, tuple):
        raise CapabilityError(
            f"The installed {_named(q.device)[0]} gives no log-sum-exp, which merging a tree's attention needs. "
            "Install a version from September 2025 on, flash-attn 2, or set LONGDRAFT_ATTENTION=sdpa."
        )
    return found[0][0].transpose(0, 1), found[1][0]


def _named(device: torch.device) -> tuple[str, Callable[..., Any]]:
    """The package's name and its entry point."""
    name = _chosen.get(device)
    if name not in sys.modules:
        name = package(device)
        if name is None:
            raise CapabilityError("flash-attn is not installed, or not for this GPU; set LONGDRAFT_ATTENTION=sdpa.")
        _chosen[device] = name
    return name, importlib.import_module(name).flash_attn_func


@functools.cache
def _entry(name: str, function: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]:
    """A package's function, the options it always gets, and those with which it returns the log-sum-exp."""
    known = inspect.signature(function).parameters
    # Version 3 reads the keys in one piece unless it may choose; version 2 has no such option here.
    options = {"num_splits": 0} if name == THREE and "num_splits" in known else {}
    # Without this option, early releases of version 3 return it always.
    asked = {"return_attn_probs": True} if "return_attn_probs" in known else {}
    return function, options, asked


def _rows(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """(H, n, d) -> (1, n, H, d), the order flash-attn wants."""
    return [t.transpose(0, 1)[None] for t in tensors]
