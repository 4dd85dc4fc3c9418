"""Operators that are one Triton kernel on a GPU in the place of several small ones of torch."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

SWITCH = "LONGDRAFT_FUSED"

_LIBRARY = torch.library.Library("longdraft", "FRAGMENT")


def available() -> bool:
    """True if Triton is installed and LONGDRAFT_FUSED=0 does not switch the kernels off."""
    return os.environ.get(SWITCH, "1") != "0" and importlib.util.find_spec("triton") is not None


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
