"""Which stores' views are chosen and copied by our kernels."""

from __future__ import annotations

import torch

from longdraft.memory.packed_store import PackedStore
from longdraft.memory.store import KVStore
from longdraft.native import kernels
from longdraft.native.library import HEAD_UNIT
from longdraft.native.views import ViewKernels


def view_kernels(full: KVStore, copy: KVStore | None = None) -> ViewKernels | None:
    """The kernels that choose of a text's rows, and copy them where a store for copies is given. None: torch serves.

    Args:
        full: where the text is kept.
    """
    # Other kinds of stores move layers in as they are asked for.
    plain = type(full) is KVStore and full.dtype == torch.float32
    kept = full.device.type == "cpu" and (plain or (type(full) is PackedStore and full.dtype == torch.float16))
    served = kept and full.shape.head_dim % HEAD_UNIT == 0
    copied = copy is None or type(copy) is PackedStore or (type(copy) is KVStore and copy.device == full.device)
    found = kernels() if served and copied else None
    return None if found is None else ViewKernels(found)
