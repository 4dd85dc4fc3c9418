"""Operators that are one Triton kernel on a GPU in the place of several small ones of torch."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

from longdraft.errors import reason_of

SWITCH = "LONGDRAFT_FUSED"

_LIBRARY = torch.library.Library("longdraft", "FRAGMENT")


def available() -> bool:
    """True if Triton is installed and LONGDRAFT_FUSED=0 does not switch the kernels off."""
    return os.environ.get(SWITCH, "1") != "0" and importlib.util.find_spec("triton") is not None


# Largest difference, relative to the largest output, between a kernel and its definition.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}


def define(schema: str, definition: Callable[..., Any], module: str) -> None:
    """Defines an operator of torch, ``longdraft::NAME``.

    Args:
        schema: name, arguments and results, in torch's notation.
        definition: computes it on a CPU.
        module: has a function NAME that computes it on a GPU; imported by the first call, as Triton may be missing.
    """
    name = schema.partition("(")[0]

    def launch(*arguments: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*arguments)

    _LIBRARY.define(schema)
    _LIBRARY.impl(name, definition, "CPU")
    _LIBRARY.impl(name, launch, "CUDA")


def fault(name: str, definition: Callable[..., torch.Tensor], *given: Any) -> str | None:
    """The reason why an operator cannot be used; None if it gives what its definition gives. Waits for the device.

    Args:
        given: made-up arguments, of which the first is a tensor of the results' dtype.
    """
    try:
        found, expected = (f(*given).float() for f in (getattr(torch.ops.longdraft, name), definition))
        close = (found - expected).abs().max() <= _TOLERANCE[given[0].dtype] * expected.abs().max()
        return None if bool(close) else "its results differ"
    except Exception as error:  # a compiler or a driver can raise any type
        return reason_of(error)
