"""A sparse copy of the KV cache: the entries that a view selects, at their true positions.

    sink | selected chunks | window | new entries | buffered entries

Copied keys keep the RoPE of their true positions. A forward on the sparse cache writes behind the copies. Entries of
tokens that it accepts may be buffered there (:meth:`SparseKVCache.buffer_path`). Drafters see these as unverified
entries of the full store, where they are never committed. A context that fits the view is copied in full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from longdraft.memory.store import KVStore
from longdraft.native.int8_kv import KVTensor
from longdraft.native.views import SUMMARY_SCORERS
from longdraft.views.scorers import SCORERS
from longdraft.views.summaries import ChunkSummaries, layer_groups, slot_kv, view_kernels
from longdraft.views.view import View

# For each layer (Hq, M, d), after RoPE, the newest last.
Queries = Mapping[int, torch.Tensor] | torch.Tensor


class SparseKVCache:
    """Sparse KV of a batch's sequences. Slots are independent.

    Args:
        full_store: the store with all KV.
        new_store: makes a store of (slots, capacity).
        view: the entries to select, and the room for new ones.
        scratch: entries that a forward writes behind the copies.

    Attributes:
        store: each slot has the copies first, then the buffered entries as committed ones. A forward on it needs
            ``root_positions``, for the position of an entry is not its index.

    Raises:
        MemoryBudgetError: it does not fit the free memory.
    """

    def __init__(self, full_store: KVStore, new_store: Callable[[int, int], KVStore], view: View, scratch: int) -> None:
        self.full_store, self.view = full_store, view
        # No context has more entries than the full store.
        self.store = new_store(full_store.slots, min(view.capacity, full_store.capacity) + scratch)
        self.store.use_states_of(full_store)
        # For each slot the number of copies. The last of them, window and new entries, are entries [start, end) of the
        # full store.
        self._num_copied, self._starts, self._ends = ([0] * full_store.slots for _ in range(3))
        kinds = scorer.summary_kinds if (scorer := SCORERS[view.scorer]) else ()
        # With summaries, selection need not read all keys.
        self.summaries = ChunkSummaries(full_store, view.chunk_size, kinds) if kinds else None
        # Slot -> (layers, Hkv, c), the chunk in each place of the copy; used by the copy kernel.
        self._chunks_in_place: dict[int, torch.Tensor] = {}
        self._select_kernels, self._copy_kernels = view_kernels(full_store), view_kernels(full_store, self.store)

    def has_full_context(self, slot: int) -> bool:
        return self._starts[slot] == 0

    def in_use(self, slot: int) -> bool:
        """True if anything of the context is copied."""
        return self._num_copied[slot] > 0

    def update(self, slot: int, queries: Queries | None = None, force: bool = False) -> bool:
        """Appends entries that are new in the full store; reselects if there is no room for them.

        Args:
            queries: score the chunks; None: the latest chunks are selected.
            force: reselect in any case, unless the whole context is copied.

        Returns:
            Whether chunks were selected.
        """
        end = self.full_store.readable_len(slot)
        self._drop_copies(slot, end)
        fits = self._num_copied[slot] + end - self._ends[slot] <= self.view.capacity
        if not fits or (force and not self.has_full_context(slot)):
            if end > self.view.capacity:
                self.reselect(slot, queries)
                return True
            self._drop_copies(slot, 0)  # the context has become shorter, and now fits in full
        size, start = self._num_copied[slot], self._ends[slot]
        targets = slice(size, size + end - start)
        self._num_copied[slot], self._ends[slot] = targets.stop, end
        if start < end and self._copy_kernels is not None:
            self._copy_kernels.copy_entries(*self._source_and_copies(), slot, range(start, end), targets.start)
        elif start < end:
            # Not by `layer`: an offloaded store would fetch whole layers for these few entries.
            for layers in self.full_store.layer_groups:
                new = self.full_store.slot_kv(slot, layers, self.full_store.capacity)
                for source, target in zip(new, (self.store.keys, self.store.values), strict=True):
                    target[layers, slot, :, targets] = source[:, :, start:end].to(self.full_store.shape.dtype)
        self.store.lengths[slot] = targets.stop
        return False

    def _drop_copies(self, slot: int, start: int) -> None:
        """Drops the copies of entries from ``start`` on."""
        if start >= self._ends[slot]:
            return
        if start < self._starts[slot]:
            self._num_copied[slot] = self._starts[slot] = self._ends[slot] = 0
        else:
            self._num_copied[slot] -= self._ends[slot] - start
            self._ends[slot] = start

    def reselect(self, slot: int, queries: Queries | None = None) -> None:
        """Selects chunks anew, and fills the slot from the full store. The buffer is empty then."""
        end = self.full_store.readable_len(slot)
        if self.summaries is not None:
            self.summaries.update(slot, end)
        chunks = self._select_in_all_layers(slot, end, queries)
        view, start = self.view, self.view.window_start(end)
        sink = min(view.sink, end)
        if chunks is not None and self._copy_kernels is not None:
            chunks = chunks.expand(-1, self.full_store.shape.kv_heads, -1).contiguous()
            # A copy of a full context has no chunks in place.
            in_place = None if self.has_full_context(slot) else self._chunks_in_place.get(slot)
            if in_place is None or in_place.shape != chunks.shape:
                in_place = self._chunks_in_place[slot] = torch.full_like(chunks, -1)
            (source, copies), window = self._source_and_copies(), range(start, end)
            self._copy_kernels.copy_view(source, copies, slot, chunks, in_place, view.chunk_size, sink, window)
            size = sink + chunks.shape[2] * view.chunk_size + end - start
        else:
            size = self._copy_layers(slot, end, queries, chunks)
        self.store.lengths[slot] = size
        self._num_copied[slot], self._starts[slot], self._ends[slot] = size, start, end

    def _source_and_copies(self) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[KVTensor, KVTensor]]:
        return (self.full_store.keys, self.full_store.values), (self.store.keys, self.store.values)

    def _select_in_all_layers(self, slot: int, end: int, queries: Queries | None) -> torch.Tensor | None:
        """Selects the chunks of all layers at once, (layers, Hkv or 1, c); None if it has to be done layer by layer."""
        layers, latest = self.full_store.shape.layers, self.view.unscored_chunks(end, queries is not None)
        if latest is not None:
            return torch.arange(latest.start, latest.stop, device=self.full_store.device).expand(layers, 1, -1)
        assert queries is not None
        scorer, reduction = self.view.scorer, self.view.reduction
        supported = self.summaries is not None if scorer in SUMMARY_SCORERS else reduction != "max"
        if self._select_kernels is None or not supported:
            return None
        summaries = None if self.summaries is None else self.summaries.for_slot(slot)
        stacked = _queries_of(queries, slice(0, layers))
        stacked = stacked[:, :, -1:] if reduction == "last" else stacked
        source, candidates = (self.full_store.keys, slot, end), self.view.candidate_chunks(end)
        sizes = self.view.chunk_size, summaries, stacked, candidates, self.view.num_chunks
        return self._select_kernels.select_chunks(scorer, reduction == "max", source, *sizes)

    def _copy_layers(self, slot: int, end: int, queries: Queries | None, chunks: torch.Tensor | None) -> int:
        """Copies the selected entries, a group of layers at a time; selects first if ``chunks`` is None.

        Returns:
            The number of entries.
        """
        all_summaries = None if self.summaries is None else self.summaries.for_slot(slot)
        dtype, size = self.full_store.shape.dtype, 0
        for layers in layer_groups(self.full_store, self._temporary_bytes(end, queries)):
            keys, values = (x[:, :, :end] for x in slot_kv(self.full_store, layers, slot))
            if chunks is not None:
                indices = self.view.kv_indices(chunks[layers].to(keys.device), end)
            else:
                summaries = None if all_summaries is None else {kind: x[layers] for kind, x in all_summaries.items()}
                group_queries = None if queries is None else _queries_of(queries, layers)
                indices = self.view.select_kv_indices(keys.to(dtype), group_queries, summaries)
            size = indices.shape[-1]
            for source, target in ((keys, self.store.keys), (values, self.store.values)):
                target[layers, slot, :, :size] = gather_kv(source, indices).to(dtype)
        return size

    def _temporary_bytes(self, end: int, queries: Queries | None) -> int:
        """Estimates the temporary memory of selecting and copying one layer, in bytes."""
        heads, d = self.full_store.shape.kv_heads, self.full_store.shape.head_dim
        copied = heads * self.view.capacity * d * self.full_store.shape.dtype.itemsize
        if queries is None or not self.view.num_chunks:
            return copied
        query_heads, count, _ = queries[0].shape
        if self.summaries is not None:
            scored = end // self.view.chunk_size
            return copied + 4 * scored * (2 * query_heads * count + heads * d)
        # One KV head at a time: its keys in float32, scores, attention weights, and results of reductions.
        return copied + 4 * end * (3 * (query_heads // heads) * count + d)

    def invalidate(self, slot: int, start: int = 0) -> None:
        """Called when entries of the full store from ``start`` on were replaced or removed. Empties the buffer."""
        self._drop_copies(slot, start)
        self.store.truncate(slot, self._num_copied[slot])
        if self.summaries is not None:
            self.summaries.invalidate(slot, start)

    def num_buffered(self, slot: int) -> int:
        return self.store.lengths[slot] - self._num_copied[slot]

    def buffer_path(self, slot: int, path: Sequence[int]) -> None:
        """Buffers the accepted path of a forward on the view, and shows it to drafters.

        Its entries become unverified entries of the full store: inexact, and overwritten by the next full verification.
        """
        start = self.store.lengths[slot]
        self.store.commit(slot, path)
        for states in self.full_store.states:
            states.commit(slot, self.full_store.readable_len(slot), path)
        new = slice(start, start + len(path))
        features = None if self.store.features is None else self.store.features[slot, new]
        dtype = self.full_store.shape.dtype
        keys, values = (x[:, slot, :, new].to(dtype) for x in (self.store.keys, self.store.values))
        self.full_store.write_entries(slot, self.full_store.readable_len(slot), keys, values, features)
        self.full_store.num_unverified[slot] += len(path)

    def clear_buffer(self, slot: int) -> None:
        """Drops buffered entries that were not shown to drafters."""
        self.store.truncate(slot, self._num_copied[slot])


def _queries_of(queries: Queries, layers: slice) -> torch.Tensor:
    """The queries of some layers, (layers, Hq, M, d)."""
    if isinstance(queries, torch.Tensor):
        return queries[layers]
    return torch.stack([queries[layer] for layer in range(layers.start, layers.stop)])


def gather_kv(source: torch.Tensor, kv_indices: torch.Tensor) -> torch.Tensor:
    """Gathers entries of a layer. Several layers at once have a first dimension more.

    Args:
        source: (Hkv, n, d), with any strides.
        kv_indices: (Hkv, m) int64 for each KV head, or (1, m) for all.

    Returns:
        (Hkv, m, d).
    """
    num_outer = len(source.shape) - 2
    if kv_indices.shape[:-1].numel() == 1:
        return source.index_select(num_outer, kv_indices.flatten())
    sizes = enumerate(source.shape[:num_outer])
    outer = [torch.arange(n, device=source.device).view(-1, *[1] * (num_outer - i)) for i, n in sizes]
    index = (*outer, kv_indices)
    return source[index]
