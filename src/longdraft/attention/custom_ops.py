"""Defines custom torch operators. Each runs a Triton kernel on a GPU, and a reference in plain torch on a CPU."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from longdraft.errors import reason_of

SWITCH = "LONGDRAFT_FUSED"  # environment variable; 0: no Triton kernels
# Largest accepted difference between a kernel and its reference, as a part of the largest output.
_TOLERANCE = {torch.float16: 0.01, torch.bfloat16: 0.05}

_LIBRARY = torch.library.Library("longdraft", "FRAGMENT")


def triton_enabled() -> bool:
    """True if Triton is installed and LONGDRAFT_FUSED=0 does not switch the kernels off."""
    return os.environ.get(SWITCH, "1") != "0" and importlib.util.find_spec("triton") is not None


def define_op(reference: Callable[..., Any], triton_module: str, mutates_args: Sequence[str] = ()) -> None:
    """Defines the operator ``longdraft::NAME``, which has the name, arguments and results of ``reference``.

    Args:
        reference: the implementation for CPUs.
        triton_module: module whose function NAME is the implementation for GPUs. Imported at the first call on a GPU.
        mutates_args: names of the arguments that the operator writes into.
    """
    name = reference.__name__

    def launch(*arguments: Any) -> Any:
        return getattr(importlib.import_module(triton_module), name)(*arguments)

    _LIBRARY.define(name + torch.library.infer_schema(reference, mutates_args=mutates_args))
    _LIBRARY.impl(name, reference, "CPU")
    _LIBRARY.impl(name, launch, "CUDA")


def mismatch_reason(reference: Callable[..., torch.Tensor], arguments: Sequence[Any]) -> str | None:
    """Returns why the kernel of ``longdraft::NAME`` does not compute what ``reference`` does, in 16 bits; None if it
    does. Waits for the device."""
    try:
        result = getattr(torch.ops.longdraft, reference.__name__)(*arguments)
        actual, expected = result.float(), reference(*arguments).float()
        is_close = bool((actual - expected).abs().max() <= _TOLERANCE[result.dtype] * expected.abs().max())
        return None if is_close else "its results differ"
    except Exception as error:  # a compiler or a driver can raise any type
        return reason_of(error)
