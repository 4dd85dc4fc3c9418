"""The instruction sets that native tests run for: all that this machine executes, or another processor's, emulated."""

from __future__ import annotations

import os
from functools import cache

from longdraft import native
from longdraft.native import build
from longdraft.native.library import Kernels, kernels_for
from tests.native import emulated

# `make test-arm` names it.
EMULATED = os.environ.get("LONGDRAFT_EMULATED")
LEVELS = [EMULATED] if EMULATED else build.levels() if native.kernels() is not None else []


@cache
def kernels_of(level: str) -> Kernels:
    return Kernels(emulated.library(level), level) if level == EMULATED else kernels_for(level)
