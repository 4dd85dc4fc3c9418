"""A sparse KV cache: copies of the KV entries that a view selects, with RoPE at their true positions.

    sink | selected chunks | window | new entries | buffered entries

A forward on the sparse cache writes scratch entries behind the copies. :meth:`SparseKVCache.buffer_path` keeps the
entries of accepted tokens as buffered entries. It also writes the entries to the full store, as unverified entries that
only drafters read. A context that fits the view is copied in full.

Shapes: Hkv KV heads, Hq query heads, M query tokens, c selected chunks, head size d.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from longdraft.attention.transfer import to_device
from longdraft.memory.store import KVStore
from longdraft.native.quantized_kv import KVTensor
from longdraft.native.views import SUMMARY_SCORERS
from longdraft.views.scorers import SCORERS
from longdraft.views.summaries import ChunkSummaries, layer_groups, slot_kv, view_kernels
from longdraft.views.view import View

# Queries (Hq, M, d) of each layer, after RoPE, the newest token last: a mapping from layers, or one stacked tensor.
Queries = Mapping[int, torch.Tensor] | torch.Tensor


class SparseKVCache:
    """Sparse copies of the slots of a KV store. Slots are independent.

    Args:
        full_store: the store with all KV.
        new_store: makes a KV store from (slots, capacity).
        view: says which entries to select, and how many new entries fit.
        scratch: maximum number of entries that a forward writes behind the copies.

    Attributes:
        store: the KV store of the copies. In each slot, the copies and then the buffered entries are committed. A
            forward on this store needs ``root_positions``, because the index of an entry is not its position.

    Raises:
        MemoryBudgetError: the sparse cache does not fit the free memory.
    """

    def __init__(self, full_store: KVStore, new_store: Callable[[int, int], KVStore], view: View, scratch: int) -> None:
        self.full_store, self.view = full_store, view
        self.store = new_store(full_store.slots, min(view.capacity, full_store.capacity) + scratch)
        self.store.use_states_of(full_store)
        # For each slot: the number of copies; and the part of the context that is copied as window and new entries,
        # entries [suffix start, suffix end) of the full store. Suffix start 0: the whole context is copied.
        self._num_copied, self._suffix_starts, self._suffix_ends = ([0] * full_store.slots for _ in range(3))
        kinds = scorer.summary_kinds if (scorer := SCORERS[view.scorer]) else ()
        # With summaries, a selection reads one or two vectors of each chunk instead of all keys.
        self.summaries = ChunkSummaries(full_store, view.chunk_size, kinds) if kinds else None
        # Slot -> (layers, Hkv, c), the copied chunks in order. The kernel copies only chunks that have changed.
        self._copied_chunks: dict[int, torch.Tensor] = {}
        self._select_kernels, self._copy_kernels = view_kernels(full_store), view_kernels(full_store, self.store)

    def has_full_context(self, slot: int) -> bool:
        """Returns True if the whole context is copied."""
        return self._suffix_starts[slot] == 0

    def in_use(self, slot: int) -> bool:
        """Returns True if the slot has copies."""
        return self._num_copied[slot] > 0

    def update(self, slot: int, queries: Queries | None = None, force: bool = False) -> bool:
        """Copies the new entries of the full store. If they do not fit, or if ``force`` is True and the context is not
        copied in full, calls :meth:`reselect` instead, and returns True."""
        kv_len = self.full_store.readable_len(slot)
        self._drop_copies(slot, kv_len)
        fits = self._num_copied[slot] + kv_len - self._suffix_ends[slot] <= self.view.capacity
        if not fits or (force and not self.has_full_context(slot)):
            if kv_len > self.view.capacity:
                self.reselect(slot, queries)
                return True
            self._drop_copies(slot, 0)  # the context has become shorter, and now fits in full
        num_copied, start = self._num_copied[slot], self._suffix_ends[slot]
        added = slice(num_copied, num_copied + kv_len - start)
        self._num_copied[slot], self._suffix_ends[slot] = added.stop, kv_len
        if start < kv_len and self._copy_kernels is not None:
            self._copy_kernels.copy_entries(*self._kv_tensors(), slot, range(start, kv_len), added.start)
        elif start < kv_len:
            # Not by full_store.layer: an offloaded store would fetch whole layers for these few entries.
            for layers in self.full_store.layer_groups:
                kv = self.full_store.slot_kv(slot, layers, self.full_store.capacity)
                for full, copies in zip(kv, (self.store.keys, self.store.values), strict=True):
                    copies[layers, slot, :, added] = full[:, :, start:kv_len].to(self.full_store.shape.dtype)
        self.store.lengths[slot] = added.stop
        return False

    def _drop_copies(self, slot: int, start: int) -> None:
        """Drops the copies of entries from ``start`` on; all copies if ``start`` is before the copied suffix."""
        if start >= self._suffix_ends[slot]:
            return
        if start < self._suffix_starts[slot]:
            self._num_copied[slot] = self._suffix_starts[slot] = self._suffix_ends[slot] = 0
        else:
            self._num_copied[slot] -= self._suffix_ends[slot] - start
            self._suffix_ends[slot] = start

    def reselect(self, slot: int, queries: Queries | None = None) -> None:
        """Selects chunks anew: ``queries`` score the chunks; None selects the latest chunks. Copies the selected
        entries to the slot, and empties the buffer."""
        kv_len = self.full_store.readable_len(slot)
        if self.summaries is not None:
            self.summaries.update(slot, kv_len)
        chunks = self._select_in_all_layers(slot, kv_len, queries)
        view, start = self.view, self.view.window_start(kv_len)
        sink = min(view.sink, kv_len)
        if chunks is not None and self._copy_kernels is not None:
            chunks = chunks.expand(-1, self.full_store.shape.kv_heads, -1).contiguous()
            # If the whole context was copied before, the copies are not in the order of the chunks.
            copied_chunks = None if self.has_full_context(slot) else self._copied_chunks.get(slot)
            if copied_chunks is None or copied_chunks.shape != chunks.shape:
                copied_chunks = self._copied_chunks[slot] = torch.full_like(chunks, -1)
            (full, copies), window = self._kv_tensors(), range(start, kv_len)
            self._copy_kernels.copy_view(full, copies, slot, chunks, copied_chunks, view.chunk_size, sink, window)
            num_copied = sink + chunks.shape[2] * view.chunk_size + kv_len - start
        else:
            num_copied = self._copy_layers(slot, kv_len, queries, chunks)
        self.store.lengths[slot] = num_copied
        self._num_copied[slot], self._suffix_starts[slot], self._suffix_ends[slot] = num_copied, start, kv_len

    def _kv_tensors(self) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[KVTensor, KVTensor]]:
        """Returns (keys, values) of the full store, and (keys, values) of the sparse cache."""
        return (self.full_store.keys, self.full_store.values), (self.store.keys, self.store.values)

    def _select_in_all_layers(self, slot: int, kv_len: int, queries: Queries | None) -> torch.Tensor | None:
        """Selects the chunks of all layers at once, (layers, Hkv or 1, c). Returns None if no kernel can do that."""
        layers, latest = self.full_store.shape.layers, self.view.unscored_chunks(kv_len, queries is not None)
        if latest is not None:
            return torch.arange(latest.start, latest.stop, device=self.full_store.device).expand(layers, 1, -1)
        assert queries is not None
        view, scorer, reduction = self.view, self.view.scorer, self.view.reduction
        kernel_supports = self.summaries is not None if scorer in SUMMARY_SCORERS else reduction != "max"
        if self._select_kernels is None or not kernel_supports:
            return None
        summaries = None if self.summaries is None else self.summaries.for_slot(slot)
        stacked = _queries_of(queries, slice(0, layers))
        stacked = stacked[:, :, -1:] if reduction == "last" else stacked
        candidates, chunk_size, num_chunks = view.candidate_chunks(kv_len), view.chunk_size, view.num_chunks_at(kv_len)
        context, use_max = (self.full_store.keys, slot, kv_len), reduction == "max"
        return self._select_kernels.select_chunks(
            scorer, use_max, context, chunk_size, summaries, stacked, candidates, num_chunks
        )

    def _copy_layers(self, slot: int, kv_len: int, queries: Queries | None, chunks: torch.Tensor | None) -> int:
        """Copies the entries of ``chunks``, sink and window by groups of layers, and returns the number of copied
        entries. If ``chunks`` is None, the chunks of each group are selected first."""
        slot_summaries = None if self.summaries is None else self.summaries.for_slot(slot)
        dtype, num_copied = self.full_store.shape.dtype, 0
        for layers in layer_groups(self.full_store, self._temporary_bytes(kv_len, queries)):
            keys, values = (x[:, :, :kv_len] for x in slot_kv(self.full_store, layers, slot))
            if chunks is not None:
                indices = self.view.kv_indices(to_device(chunks[layers], keys.device), kv_len)
            else:
                summaries = None if slot_summaries is None else {kind: x[layers] for kind, x in slot_summaries.items()}
                group_queries = None if queries is None else _queries_of(queries, layers)
                indices = self.view.select_kv_indices(keys.to(dtype), group_queries, summaries)
            num_copied = indices.shape[-1]
            for full, copies in ((keys, self.store.keys), (values, self.store.values)):
                copies[layers, slot, :, :num_copied] = gather_kv(full, indices).to(dtype)
        return num_copied

    def _temporary_bytes(self, kv_len: int, queries: Queries | None) -> int:
        """Estimates the temporary memory of selecting and copying one layer, in bytes."""
        heads, d = self.full_store.shape.kv_heads, self.full_store.shape.head_dim
        copied_bytes = heads * self.view.capacity * d * self.full_store.shape.dtype.itemsize
        if queries is None or not self.view.num_chunks:
            return copied_bytes
        query_heads, num_tokens, _ = queries[0].shape
        if self.summaries is not None:  # in float32 (4 bytes): two scores for each query and chunk, and the summaries
            num_chunks = kv_len // self.view.chunk_size
            return copied_bytes + 4 * num_chunks * (2 * query_heads * num_tokens + heads * d)
        # In float32, for one KV head: the keys; and for each query scores, attention weights and reduced scores.
        return copied_bytes + 4 * kv_len * (3 * (query_heads // heads) * num_tokens + d)

    def invalidate(self, slot: int, start: int = 0) -> None:
        """Drops the buffer, and the copies of entries from ``start`` on, which the full store replaced or removed."""
        self._drop_copies(slot, start)
        self.store.truncate(slot, self._num_copied[slot])
        if self.summaries is not None:
            self.summaries.invalidate(slot, start)

    def num_buffered(self, slot: int) -> int:
        """Returns the number of buffered entries."""
        return self.store.lengths[slot] - self._num_copied[slot]

    def buffer_path(self, slot: int, path: Sequence[int]) -> None:
        """Buffers the accepted path of a forward on the sparse cache, and writes it to the full store for drafters.
        In the full store the entries are unverified: inexact, and overwritten by the next full verification."""
        start = self.store.lengths[slot]
        self.store.commit(slot, path)
        for states in self.full_store.states:
            states.commit(slot, self.full_store.readable_len(slot), path)
        buffered = slice(start, start + len(path))
        features = None if self.store.features is None else self.store.features[slot, buffered]
        dtype = self.full_store.shape.dtype
        keys, values = (x[:, slot, :, buffered].to(dtype) for x in (self.store.keys, self.store.values))
        self.full_store.write_entries(slot, self.full_store.readable_len(slot), keys, values, features)
        self.full_store.num_unverified[slot] += len(path)

    def clear_buffer(self, slot: int) -> None:
        """Drops all buffered entries from the sparse cache. The full store keeps them as unverified entries."""
        self.store.truncate(slot, self._num_copied[slot])


def _queries_of(queries: Queries, layers: slice) -> torch.Tensor:
    """Returns the queries of a range of layers as one tensor (layers, Hq, M, d)."""
    if isinstance(queries, torch.Tensor):
        return queries[layers]
    return torch.stack([queries[layer] for layer in range(layers.start, layers.stop)])


def gather_kv(source: torch.Tensor, kv_indices: torch.Tensor) -> torch.Tensor:
    """Gathers entries of a layer's keys or values ``source`` (Hkv, entries, d). Returns (Hkv, selected, d).
    ``kv_indices`` is (Hkv, selected) int64, or (1, selected) if all KV heads share the entries. All tensors may have a
    leading dimension for several layers."""
    entry_dim = len(source.shape) - 2
    if kv_indices.shape[:-1].numel() == 1:  # index_select is faster than advanced indexing
        return source.index_select(entry_dim, kv_indices.flatten())
    # Indices of layers and heads, each in the shape that broadcasts with kv_indices.
    sizes = enumerate(source.shape[:entry_dim])
    outer = [torch.arange(n, device=source.device).view(-1, *[1] * (entry_dim - dim)) for dim, n in sizes]
    index = (*outer, kv_indices)
    return source[index]
