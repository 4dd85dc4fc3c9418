"""Layers that are chosen and copied together: on a GPU as many as memory allows, for each operation is a launch."""

from __future__ import annotations

import torch

from longdraft.memory.store import KVStore

# Bytes that intermediate results may take on a GPU.
MOST = 512 << 20


def together(store: KVStore, each: int, first: int = 0) -> list[slice]:
    """Groups a store's layers, from ``first`` on.

    On a CPU, where a layer's numbers stay in its caches, and in a store that holds few layers at a time, each layer is
    a group of its own.

    Args:
        each: bytes of a layer's intermediate results.
    """
    at_once = max(1, MOST // max(1, each)) if store.device.type != "cpu" and _lies_there(store) else 1
    end = store.shape.layers
    return [slice(i, min(i + at_once, end)) for i in range(first, end, at_once)]


def text_of(store: KVStore, layers: slice, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (layers, Hkv, capacity, d) of a group that :func:`together` made, to be read only."""
    if _lies_there(store):
        return store.keys[layers, slot], store.values[layers, slot]
    keys, values = store.layer(layers.start)
    return keys[None, slot], values[None, slot]


def _lies_there(store: KVStore) -> bool:
    return type(store).layer is KVStore.layer
