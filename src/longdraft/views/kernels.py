"""Which stores' views are chosen and copied by our kernels."""

from __future__ import annotations

import torch

from longdraft.kv.store import KVStore
from longdraft.native import kernels
from longdraft.native.library import HEAD_UNIT
from longdraft.native.views import ViewKernels


def view_kernels(*stores: KVStore) -> ViewKernels | None:
    """The kernels for texts that are kept in these stores; None: torch's own operations serve."""
    found = kernels() if all(map(_plain, stores)) else None
    return None if found is None else ViewKernels(found)


def _plain(store: KVStore) -> bool:
    # Other kinds of stores move layers in as they are asked for, or round what they keep.
    shape, kept = store.shape, type(store) is KVStore and store.device.type == "cpu"
    return kept and shape.dtype == torch.float32 and shape.head_dim % HEAD_UNIT == 0
