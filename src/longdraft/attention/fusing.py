"""Tells whether Triton kernels may take the place of several small ones of torch on a GPU."""

from __future__ import annotations

import importlib.util
import os

SWITCH = "LONGDRAFT_FUSED"


def available() -> bool:
    """True if Triton is installed and LONGDRAFT_FUSED=0 does not switch the kernels off."""
    return os.environ.get(SWITCH, "1") != "0" and importlib.util.find_spec("triton") is not None
