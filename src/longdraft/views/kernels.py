"""Which stores' views are chosen and copied by our kernels."""

from __future__ import annotations

import torch

from longdraft.kv.store import KVStore
from longdraft.native import kernels
from longdraft.native.views import ViewKernels


def view_kernels(*stores: KVStore) -> ViewKernels | None:
    """The kernels for texts that are kept in these stores; None: torch's own operations serve."""
    # Other kinds of stores move layers in as they are asked for, or round what they keep.
    plain = all(type(s) is KVStore and s.shape.dtype == torch.float32 and s.device.type == "cpu" for s in stores)
    found = kernels() if plain else None
    return None if found is None else ViewKernels(found)
