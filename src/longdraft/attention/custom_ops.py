"""Custom operators of torch: one Triton kernel on a GPU, several small operators of torch on a CPU."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

ENVIRONMENT_VARIABLE = "LONGDRAFT_FUSED"

_LIBRARY = torch.library.Library("longdraft", "FRAGMENT")


def triton_enabled() -> bool:
    """True if Triton is installed and LONGDRAFT_FUSED=0 does not switch the kernels off."""
    return os.environ.get(ENVIRONMENT_VARIABLE, "1") != "0" and importlib.util.find_spec("triton") is not None


def define_op(reference: Callable[..., Any], triton_module: str, mutates_args: Sequence[str] = ()) -> None:
    """Defines the operator ``longdraft::NAME``, with the name, arguments and results of its reference implementation.

    Args:
        reference: runs on a CPU.
        triton_module: has a function of the same name for GPUs. Imported by the first call, for Triton may be missing.
        mutates_args: arguments that the operator writes into.
    """
    name = reference.__name__

    def launch(*arguments: Any) -> Any:
        return getattr(importlib.import_module(triton_module), name)(*arguments)

    _LIBRARY.define(name + torch.library.infer_schema(reference, mutates_args=mutates_args))
    _LIBRARY.impl(name, reference, "CPU")
    _LIBRARY.impl(name, launch, "CUDA")
