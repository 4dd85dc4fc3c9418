"""Finds the kernels that choose and copy views, for the stores that they support."""

from __future__ import annotations

import torch

from longdraft.memory.store import KVStore
from longdraft.native import kernels
from longdraft.native.library import HEAD_UNIT
from longdraft.native.views import ViewKernels


def view_kernels(full: KVStore, copy: KVStore | None = None) -> ViewKernels | None:
    """Returns kernels that choose of a text's rows, and copy them to a second store; None if torch has to do that.

    Args:
        full: the store that holds the text.
    """
    # Other kinds of stores fetch layers when they are read.
    halved = full.dtype == torch.float16 != full.shape.dtype
    readable = type(full) is KVStore and full.device.type == "cpu" and (halved or full.dtype == torch.float32)
    aligned = full.shape.head_dim % HEAD_UNIT == 0
    writable = copy is None or (type(copy) is KVStore and copy.device == full.device)
    library = kernels() if readable and aligned and writable else None
    return None if library is None else ViewKernels(library)
