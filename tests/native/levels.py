"""The instruction sets that native tests run for: all that this machine executes, or another machine's, emulated."""

from __future__ import annotations

import os
import shutil
from functools import cache

import pytest

from longdraft import native
from longdraft.native import build
from longdraft.native.library import NATIVE_ENV, Kernels
from tests.native import emulated

# Names of build.LEVELS, from `make test-arm`.
EMULATED = os.environ.get("LONGDRAFT_EMULATED", "").split()


def _levels() -> list[str]:
    """Those of this machine where there is a compiler, or kernels: ones that cannot be compiled are a failure."""
    compiler = os.environ.get(NATIVE_ENV) != "0" and any(map(shutil.which, ("g++", "clang++", "c++")))
    try:
        return build.supported_levels() if compiler or native.kernels() is not None else []
    except OSError:  # there are none for this kind of machine
        return []


LEVELS = EMULATED or _levels()
# Results have the same bits on all of these: beside emulated ones, this machine's most portable one.
COMPARED_LEVELS = LEVELS if LEVELS is not EMULATED else [*EMULATED, *_levels()[-1:]]
# Whether the kernels that serve here attend in tiles, whose products are of numbers in bfloat16.
TILES = (found := native.kernels()) is not None and found.level.endswith("amx")
needs_kernels = pytest.mark.skipif(not LEVELS, reason=f"no kernels here: {native.unavailable_reason()}")


@cache
def kernels_of(level: str) -> Kernels:
    return Kernels(emulated.library(level) if level in EMULATED else build.load_library(level), level)
