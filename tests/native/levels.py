"""The instruction sets that native tests run for: all that this machine executes, or another processor's, emulated."""

from __future__ import annotations

import os
import shutil
from functools import cache

import pytest

from longdraft import native
from longdraft.native import build
from longdraft.native.library import NATIVE_ENV, Kernels
from tests.native import emulated

# `make test-arm` names it.
EMULATED = os.environ.get("LONGDRAFT_EMULATED")


def _levels() -> list[str]:
    """Those of this machine where there is a compiler, or kernels: ones that cannot be compiled are a failure."""
    compiler = os.environ.get(NATIVE_ENV) != "0" and any(map(shutil.which, ("g++", "clang++", "c++")))
    try:
        return build.supported_levels() if compiler or native.kernels() is not None else []
    except OSError:  # there are none for this kind of machine
        return []


LEVELS = [EMULATED] if EMULATED else _levels()
# Whether the kernels that serve here attend in tiles, whose products are of numbers in bfloat16.
TILES = (found := native.kernels()) is not None and found.level.endswith("amx")
needs_kernels = pytest.mark.skipif(not LEVELS, reason=f"no kernels here: {native.unavailable_reason()}")


@cache
def kernels_of(level: str) -> Kernels:
    return Kernels(emulated.library(level) if level == EMULATED else build.load_library(level), level)
