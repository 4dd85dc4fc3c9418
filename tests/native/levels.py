"""The instruction sets that native tests run for: all that this machine executes, or another processor's, emulated."""

from __future__ import annotations

import os
import shutil
from functools import cache

import pytest

from longdraft import native
from longdraft.native import build
from longdraft.native.library import SWITCH, Kernels, kernels_for
from tests.native import emulated

# `make test-arm` names it.
EMULATED = os.environ.get("LONGDRAFT_EMULATED")
HERE = native.kernels() is not None
LEVELS = [EMULATED] if EMULATED else build.levels() if HERE else []
# Where there is a compiler, kernels that cannot be compiled are a failure and no reason to leave a test out.
_COMPILED = os.environ.get(SWITCH) != "0" and any(map(shutil.which, ("g++", "clang++", "c++")))
needs_kernels = pytest.mark.skipif(not HERE and not _COMPILED, reason=f"no kernels here: {native.missing()}")


@cache
def kernels_of(level: str) -> Kernels:
    return Kernels(emulated.library(level), level) if level == EMULATED else kernels_for(level)
