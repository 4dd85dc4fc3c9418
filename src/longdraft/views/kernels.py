"""How layers are chosen and copied: by our kernels, or in torch, on a GPU as many together as memory allows."""

from __future__ import annotations

import torch

from longdraft.memory.store import KVStore
from longdraft.native import kernels
from longdraft.native.library import HEAD_UNIT
from longdraft.native.views import ViewKernels

# Bytes that intermediate results may take on a GPU.
MOST = 512 << 20


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


def together(store: KVStore, each: int) -> list[slice]:
    """Groups a store's layers.

    On a CPU, where a layer's numbers stay in its caches, and in a store that holds few layers at a time, each layer is
    a group of its own.

    Args:
        each: bytes of a layer's intermediate results.
    """
    at_once = max(1, MOST // max(1, each)) if store.device.type != "cpu" and _lies_there(store) else 1
    end = store.shape.layers
    return [slice(i, min(i + at_once, end)) for i in range(0, end, at_once)]


def text_of(store: KVStore, layers: slice, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (layers, Hkv, capacity, d) of a group that :func:`together` made, to be read only."""
    if _lies_there(store):
        return store.keys[layers, slot], store.values[layers, slot]
    keys, values = store.layer(layers.start)
    return keys[None, slot], values[None, slot]


def _lies_there(store: KVStore) -> bool:
    return type(store).layer is KVStore.layer
