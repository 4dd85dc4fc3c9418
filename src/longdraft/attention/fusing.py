"""Operators that are one Triton kernel on a GPU in the place of several small ones of torch."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

SWITCH = "LONGDRAFT_FUSED"

_LIBRARY = torch.library.Library("longdraft", "FRAGMENT")


def available() -> bool:
    """True if Triton is installed and LONGDRAFT_FUSED=0 does not switch the kernels off."""
    return os.environ.get(SWITCH, "1") != "0" and importlib.util.find_spec("triton") is not None


def define(definition: Callable[..., Any], module: str, writes: Sequence[str] = ()) -> None:
    """Defines an operator of torch, ``longdraft::NAME``, with the name, arguments and results of its definition.

    Args:
        definition: computes it on a CPU.
        module: has a function of the same name that computes it on a GPU; imported by the first call, as Triton may be
            missing.
        writes: arguments that it writes into.
    """
    name = definition.__name__

    def launch(*arguments: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*arguments)

    _LIBRARY.define(name + torch.library.infer_schema(definition, mutates_args=writes))
    _LIBRARY.impl(name, definition, "CPU")
    _LIBRARY.impl(name, launch, "CUDA")
