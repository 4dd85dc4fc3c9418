"""Summaries of chunks of keys, by which they are scored without being read (SpecPV, section 3.2); kernels for views.

A summary is the element-wise maximum, minimum or mean of a chunk's keys after RoPE, of each layer and KV head.
"""

from __future__ import annotations

import torch

from longdraft.memory.store import KVStore, empty_transposed
from longdraft.native import kernels
from longdraft.native.library import HEAD_DIM_MULTIPLE
from longdraft.native.views import ViewKernels

# Bytes that intermediate results may take on a GPU.
MOST = 512 << 20


def view_kernels(full_store: KVStore, copy_store: KVStore | None = None) -> ViewKernels | None:
    """Returns kernels that choose of a text's rows, and copy them to a second store; None if torch has to do that.

    Args:
        full_store: the store that holds the text.
    """
    # Other kinds of stores fetch layers when they are read.
    halved = full_store.dtype == torch.bfloat16 != full_store.shape.dtype
    readable = (
        type(full_store) is KVStore
        and full_store.device.type == "cpu"
        and (halved or full_store.dtype == torch.float32)
    )
    aligned = full_store.shape.head_dim % HEAD_DIM_MULTIPLE == 0
    writable = copy_store is None or (type(copy_store) is KVStore and copy_store.device == full_store.device)
    library = kernels() if readable and aligned and writable else None
    return None if library is None else ViewKernels(library)


def layer_groups(store: KVStore, bytes_per_layer: int) -> list[slice]:
    """Groups a store's layers.

    On a CPU, where a layer's numbers stay in its caches, and in a store that holds few layers at a time, each layer is
    a group of its own.

    Args:
        each: bytes of a layer's intermediate results.
    """
    at_once = max(1, MOST // max(1, bytes_per_layer)) if store.device.type != "cpu" and _lies_there(store) else 1
    end = store.shape.layers
    return [slice(i, min(i + at_once, end)) for i in range(0, end, at_once)]


def slot_kv(store: KVStore, layers: slice, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (layers, Hkv, capacity, d) of a group that :func:`layer_groups` made, to be read only."""
    if _lies_there(store):
        return store.keys[layers, slot], store.values[layers, slot]
    keys, values = store.layer(layers.start)
    return keys[None, slot], values[None, slot]


def _lies_there(store: KVStore) -> bool:
    return type(store).layer is KVStore.layer


def summarize(kind: str, keys: torch.Tensor) -> torch.Tensor:
    """Summarises keys (..., chunks, chunk, d) -> (..., chunks, d) as "largest", "smallest" or "mean"."""
    if kind == "mean":
        return keys.float().mean(-2)
    return keys.amax(-2) if kind == "largest" else keys.amin(-2)


class ChunkSummaries:
    """Keeps summaries of the complete chunks of a store's rows; each is computed once, and again if it was forgotten.

    Args:
        store: with the keys.
        chunk: rows of a chunk.
        kinds: of summaries.
    """

    def __init__(self, store: KVStore, chunk: int, kinds: tuple[str, ...]) -> None:
        self._store, self._chunk = store, chunk
        shape = store.shape
        size = (shape.layers, store.slots, shape.kv_heads, store.capacity // chunk, shape.head_dim)
        # Scores are products of few queries with many chunks.
        self._kept = {kind: empty_transposed(size, shape.dtype, store.device) for kind in kinds}
        self._kernels = view_kernels(store)
        self._counts = [0] * store.slots

    def for_slot(self, slot: int) -> dict[str, torch.Tensor]:
        """Returns kind -> (layers, Hkv, chunks, d); chunks that were not summarised hold any numbers."""
        return {kind: kept[:, slot] for kind, kept in self._kept.items()}

    def update(self, slot: int, kv_len: int) -> None:
        """Summarises the chunks that a text of ``kv_len`` rows has completed since the last call."""
        old, new = self._counts[slot], kv_len // self._chunk
        self._counts[slot] = new
        if new <= old:
            return
        if self._kernels is not None:
            self._kernels.summarize_chunks(self._store.keys, slot, self._chunk, self.for_slot(slot), old, new)
            return
        shape, rows = self._store.shape, slice(old * self._chunk, new * self._chunk)
        for layers in layer_groups(self._store, 4 * shape.kv_heads * shape.head_dim * (rows.stop - rows.start)):
            keys = slot_kv(self._store, layers, slot)[0][:, :, rows]
            chunks = keys.to(shape.dtype).unflatten(2, (-1, self._chunk))
            for kind, kept in self._kept.items():
                kept[layers, slot, :, old:new] = summarize(kind, chunks).to(kept)

    def invalidate(self, slot: int, start: int) -> None:
        """Called when the slot's rows from ``start`` on have been replaced or removed."""
        self._counts[slot] = min(self._counts[slot], start // self._chunk)
