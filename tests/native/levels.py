"""The instruction sets that native tests run for: all that this machine executes."""

from __future__ import annotations

from functools import cache

from longdraft import native
from longdraft.native import build
from longdraft.native.library import Kernels, kernels_for

LEVELS = build.levels() if native.kernels() is not None else []


@cache
def kernels_of(level: str) -> Kernels:
    return kernels_for(level)
