"""Summaries of key chunks, which are scored in place of the keys (SpecPV, section 3.2); kernels for views.

A summary is the element-wise maximum, minimum or mean of a chunk's keys after RoPE, for each layer and KV head.
"""

from __future__ import annotations

import torch

from longdraft.memory.store import KVStore, empty_transposed
from longdraft.native import kernels
from longdraft.native.library import HEAD_DIM_MULTIPLE
from longdraft.native.views import ViewKernels

# Most bytes of temporary tensors on a GPU.
MAX_TEMPORARY_BYTES = 512 << 20


def view_kernels(full_store: KVStore, copy_store: KVStore | None = None) -> ViewKernels | None:
    """Returns kernels that select entries of a store and copy them to a second one; None if they support neither.

    Args:
        full_store: the store with all KV.
    """
    # Offloaded stores fetch layers when they are read.
    is_bf16_rounded = full_store.dtype == torch.bfloat16 != full_store.shape.dtype
    float_dtype = is_bf16_rounded or full_store.dtype == torch.float32
    readable = type(full_store) is KVStore and full_store.device.type == "cpu" and float_dtype
    aligned = full_store.shape.head_dim % HEAD_DIM_MULTIPLE == 0
    writable = copy_store is None or (type(copy_store) is KVStore and copy_store.device == full_store.device)
    library = kernels() if readable and aligned and writable else None
    return None if library is None else ViewKernels(library)


def layer_groups(store: KVStore, bytes_per_layer: int) -> list[slice]:
    """Groups a store's layers, to process a group at a time.

    Each layer is its own group on a CPU, where one layer's data stays in the caches, and in an offloaded store.

    Args:
        bytes_per_layer: of temporary tensors.
    """
    layers_per_group = 1
    if store.device.type != "cpu" and _is_in_memory(store):
        layers_per_group = max(1, MAX_TEMPORARY_BYTES // max(1, bytes_per_layer))
    end = store.shape.layers
    return [slice(i, min(i + layers_per_group, end)) for i in range(0, end, layers_per_group)]


def slot_kv(store: KVStore, layers: slice, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns keys and values (layers, Hkv, capacity, d) of a group of :func:`layer_groups`; read-only."""
    if _is_in_memory(store):
        return store.keys[layers, slot], store.values[layers, slot]
    keys, values = store.layer(layers.start)
    return keys[None, slot], values[None, slot]


def _is_in_memory(store: KVStore) -> bool:
    return type(store).layer is KVStore.layer


def summarize(kind: str, keys: torch.Tensor) -> torch.Tensor:
    """Summarizes keys (..., chunks, chunk_size, d) -> (..., chunks, d) by "largest", "smallest" or "mean"."""
    if kind == "mean":
        return keys.float().mean(-2)
    return keys.amax(-2) if kind == "largest" else keys.amin(-2)


class ChunkSummaries:
    """Summaries of a store's complete chunks. Each is computed once, and again after :meth:`invalidate`.

    Args:
        store: has the keys.
        chunk_size: entries of a chunk.
        kinds: kinds of summaries, see :func:`summarize`.
    """

    def __init__(self, store: KVStore, chunk_size: int, kinds: tuple[str, ...]) -> None:
        self._store, self._chunk_size = store, chunk_size
        shape = store.shape
        size = (shape.layers, store.slots, shape.kv_heads, store.capacity // chunk_size, shape.head_dim)
        # Transposed: a few queries are multiplied with many chunks.
        self._summaries = {kind: empty_transposed(size, shape.dtype, store.device) for kind in kinds}
        self._kernels = view_kernels(store)
        self._num_summarized = [0] * store.slots

    def for_slot(self, slot: int) -> dict[str, torch.Tensor]:
        """Returns kind -> (layers, Hkv, chunks, d). Chunks that are not summarized yet hold arbitrary numbers."""
        return {kind: summary[:, slot] for kind, summary in self._summaries.items()}

    def update(self, slot: int, kv_len: int) -> None:
        """Summarizes the chunks that a context of ``kv_len`` has completed since the last call."""
        old, new = self._num_summarized[slot], kv_len // self._chunk_size
        self._num_summarized[slot] = new
        if new <= old:
            return
        if self._kernels is not None:
            self._kernels.summarize_chunks(self._store.keys, slot, self._chunk_size, self.for_slot(slot), old, new)
            return
        shape, entries = self._store.shape, slice(old * self._chunk_size, new * self._chunk_size)
        for layers in layer_groups(self._store, 4 * shape.kv_heads * shape.head_dim * (entries.stop - entries.start)):
            keys = slot_kv(self._store, layers, slot)[0][:, :, entries]
            chunks = keys.to(shape.dtype).unflatten(2, (-1, self._chunk_size))
            for kind, summary in self._summaries.items():
                summary[layers, slot, :, old:new] = summarize(kind, chunks).to(summary)

    def invalidate(self, slot: int, start: int) -> None:
        """Called when the slot's entries from ``start`` on were replaced or removed."""
        self._num_summarized[slot] = min(self._num_summarized[slot], start // self._chunk_size)
