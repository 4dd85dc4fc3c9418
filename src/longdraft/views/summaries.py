"""Summaries of chunks of keys, which scorers read in place of the keys (SpecPV, section 3.2).

A summary is the element-wise maximum, minimum or mean of a chunk's keys after RoPE, for each layer and KV head. This
module also chooses the kernels and the groups of layers for views. Shapes: Hkv KV heads, head size d.
"""

from __future__ import annotations

import torch

from longdraft.memory.kv_tensors import empty_transposed
from longdraft.memory.store import KVStore
from longdraft.native import kernels
from longdraft.native.library import HEAD_DIM_MULTIPLE
from longdraft.native.views import ViewKernels

# Most bytes of temporary tensors for a group of layers on a GPU: larger groups need fewer kernel launches, more memory.
MAX_TEMPORARY_BYTES = 512 << 20


def view_kernels(full_store: KVStore, copy_store: KVStore | None = None) -> ViewKernels | None:
    """Returns the CPU kernels that select entries of ``full_store``, and copy the entries to ``copy_store`` if that is
    not None. Returns None if the kernels do not support a store."""
    is_bf16_rounded = full_store.dtype == torch.bfloat16 != full_store.shape.dtype
    is_dtype_supported = is_bf16_rounded or full_store.dtype == torch.float32
    is_readable = full_store.is_resident and full_store.device.type == "cpu" and is_dtype_supported
    is_aligned = full_store.shape.head_dim % HEAD_DIM_MULTIPLE == 0
    is_writable = copy_store is None or (copy_store.is_resident and copy_store.device == full_store.device)
    library = kernels() if is_readable and is_aligned and is_writable else None
    return None if library is None else ViewKernels(library)


def layer_groups(store: KVStore, bytes_per_layer: int) -> list[slice]:
    """Groups a store's layers. A caller processes one group at a time.
    On a CPU a group is one layer, whose data stays in the CPU's caches. In an offloaded store a group is one layer too.
    ``bytes_per_layer`` are the bytes of the temporary tensors for processing one layer."""
    layers_per_group = 1
    if store.device.type != "cpu" and store.is_resident:
        layers_per_group = max(1, MAX_TEMPORARY_BYTES // max(1, bytes_per_layer))
    end = store.shape.layers
    return [slice(i, min(i + layers_per_group, end)) for i in range(0, end, layers_per_group)]


def slot_kv(store: KVStore, layers: slice, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns keys and values (layers, Hkv, capacity, d) of one of the :func:`layer_groups`; read-only."""
    if store.is_resident:
        return store.keys[layers, slot], store.values[layers, slot]
    keys, values = store.layer(layers.start)
    return keys[None, slot], values[None, slot]


def summarize(kind: str, keys: torch.Tensor) -> torch.Tensor:
    """Summarizes keys (..., chunks, chunk_size, d) to (..., chunks, d); ``kind`` is "largest", "smallest" or "mean"."""
    if kind == "mean":
        return keys.float().mean(-2)
    return keys.amax(-2) if kind == "largest" else keys.amin(-2)


class ChunkSummaries:
    """Summaries of the complete chunks of a store. A summary is computed once, and again after :meth:`invalidate`.

    Args:
        store: the KV store with the keys.
        chunk_size: number of entries of a chunk.
        kinds: kinds of summaries, see :func:`summarize`.
    """

    def __init__(self, store: KVStore, chunk_size: int, kinds: tuple[str, ...]) -> None:
        self._store, self._chunk_size = store, chunk_size
        shape = store.shape
        summary_shape = (shape.layers, store.slots, shape.kv_heads, store.capacity // chunk_size, shape.head_dim)
        # The transposed layout is faster for the product of a few queries with many summaries.
        self._summaries = {kind: empty_transposed(summary_shape, shape.dtype, store.device) for kind in kinds}
        self._kernels = view_kernels(store)
        self._num_summarized = [0] * store.slots  # number of summarized chunks of each slot

    def for_slot(self, slot: int) -> dict[str, torch.Tensor]:
        """Returns kind -> summaries (layers, Hkv, chunks, d). Chunks that are not summarized have arbitrary numbers."""
        return {kind: summary[:, slot] for kind, summary in self._summaries.items()}

    def update(self, slot: int, kv_len: int) -> None:
        """Summarizes the complete chunks of a context of ``kv_len`` entries that have no summary yet."""
        start, end = self._num_summarized[slot], kv_len // self._chunk_size
        self._num_summarized[slot] = end
        if end <= start:
            return
        if self._kernels is not None:
            self._kernels.summarize_chunks(self._store.keys, slot, self._chunk_size, self.for_slot(slot), start, end)
            return
        shape, entries = self._store.shape, slice(start * self._chunk_size, end * self._chunk_size)
        for layers in layer_groups(self._store, 4 * shape.kv_heads * shape.head_dim * (entries.stop - entries.start)):
            keys = slot_kv(self._store, layers, slot)[0][:, :, entries]
            chunks = keys.to(shape.dtype).unflatten(2, (-1, self._chunk_size))
            for kind, summary in self._summaries.items():
                summary[layers, slot, :, start:end] = summarize(kind, chunks).to(summary)

    def invalidate(self, slot: int, start: int) -> None:
        """Drops the summaries of chunks whose entries from ``start`` on were replaced or removed."""
        self._num_summarized[slot] = min(self._num_summarized[slot], start // self._chunk_size)
