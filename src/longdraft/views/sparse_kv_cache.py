"""Copies of the rows that a view shows, at their true positions.

    sink | chosen chunks | window | rows since then | waiting rows

Each copy is an exact row of the full store, its key with the RoPE of its true position. A forward on them writes behind
them. Rows that it accepts may wait there (:meth:`SparseKVCache.buffer_path`); they are shown to drafters as unverified rows of the
full store, and are never committed there. A text that is no longer than the view and its room is there whole.
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
    """The views of a batch; slots do not affect each other.

    Args:
        full_store: the store with all KV.
        new_store: makes a store of (slots, capacity).
        view: which rows are chosen, and how many new ones there is room for.
        scratch: rows of a forward that are written behind them.

    Attributes:
        store: a slot's first rows are copies, the committed rows behind them wait. A forward on it needs ``bases``,
            for a row's position is not its index.

    Raises:
        MemoryBudgetError: it does not fit the memory that is free.
    """

    def __init__(self, full_store: KVStore, new_store: Callable[[int, int], KVStore], view: View, scratch: int) -> None:
        self.full_store, self.view = full_store, view
        # No text has more rows than the full store.
        self.store = new_store(full_store.slots, min(view.capacity, full_store.capacity) + scratch)
        self.store.use_states_of(full_store)
        # Rows of each slot's copies; the last of them are rows [start, end) of the text.
        self._sizes, self._starts, self._ends = ([0] * full_store.slots for _ in range(3))
        scorer = SCORERS[view.scorer]
        # So that choosing need not read all keys.
        self.summaries = (
            ChunkSummaries(full_store, view.chunk_size, scorer.summary_kinds)
            if scorer and scorer.summary_kinds
            else None
        )
        # Slot -> chunks (layers, Hkv, c) that each place of its copy holds, if our kernels copy.
        self._held: dict[int, torch.Tensor] = {}
        self._chooses, self._copies = view_kernels(full_store), view_kernels(full_store, self.store)

    def has_full_context(self, slot: int) -> bool:
        return self._starts[slot] == 0

    def in_use(self, slot: int) -> bool:
        """True if anything of the text is there."""
        return self._sizes[slot] > 0

    def update(self, slot: int, queries: Queries | None = None, force: bool = False) -> bool:
        """Appends the rows that the full store has gained; chooses anew if there is no room for them.

        Args:
            queries: choose the chunks; None: the latest chunks are chosen.
            force: choose anew in any case, unless all of the text is there.

        Returns:
            Whether chunks were chosen.
        """
        end = self.full_store.readable_len(slot)
        self._cut(slot, end)
        fits = self._sizes[slot] + end - self._ends[slot] <= self.view.capacity
        if not fits or (force and not self.has_full_context(slot)):
            if end > self.view.capacity:
                self.reselect(slot, queries)
                return True
            self._cut(slot, 0)  # the text has become shorter, and now all of it fits
        size, start = self._sizes[slot], self._ends[slot]
        places, rows = slice(size, size + end - start), slice(start, end)
        self._sizes[slot], self._ends[slot] = places.stop, end
        if rows.start < rows.stop and self._copies is not None:
            self._copies.copy_entries(*self._text_and_copies(), slot, range(rows.start, rows.stop), places.start)
        elif rows.start < rows.stop:
            # Not by `layer`: a store off the device would fetch whole layers for these few rows.
            for layers in self.full_store.layer_groups:
                new = self.full_store.slot_kv(slot, layers, self.full_store.capacity)
                for source, target in zip(new, (self.store.keys, self.store.values), strict=True):
                    target[layers, slot, :, places] = source[:, :, rows].to(self.full_store.shape.dtype)
        self.store.lengths[slot] = places.stop
        return False

    def _cut(self, slot: int, start: int) -> None:
        """Forgets copies of the text's rows from ``start`` on."""
        if start >= self._ends[slot]:
            return
        if start < self._starts[slot]:
            self._sizes[slot] = self._starts[slot] = self._ends[slot] = 0
        else:
            self._sizes[slot] -= self._ends[slot] - start
            self._ends[slot] = start

    def reselect(self, slot: int, queries: Queries | None = None) -> None:
        """Fills a slot anew from the full store; no rows wait then."""
        end = self.full_store.readable_len(slot)
        if self.summaries is not None:
            self.summaries.update(slot, end)
        chosen = self._chosen(slot, end, queries)
        view, start = self.view, self.view.window_start(end)
        sink = min(view.sink, end)
        if chosen is not None and self._copies is not None:
            chosen = chosen.expand(-1, self.full_store.shape.kv_heads, -1).contiguous()
            # In a copy that held all of a text, or nothing, no place belongs to a chunk.
            held = None if self.has_full_context(slot) else self._held.get(slot)
            if held is None or held.shape != chosen.shape:
                held = self._held[slot] = torch.full_like(chosen, -1)
            self._copies.copy_view(
                *self._text_and_copies(), slot, chosen, held, view.chunk_size, sink, range(start, end)
            )
            size = sink + chosen.shape[2] * view.chunk_size + end - start
        else:
            size = self._copy_each(slot, end, queries, chosen)
        self.store.lengths[slot] = size
        self._sizes[slot], self._starts[slot], self._ends[slot] = size, start, end

    def _text_and_copies(self) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[KVTensor, KVTensor]]:
        return (self.full_store.keys, self.full_store.values), (self.store.keys, self.store.values)

    def _chosen(self, slot: int, end: int, queries: Queries | None) -> torch.Tensor | None:
        """Chooses the chunks of all layers at once, (layers, Hkv or 1, c); None if layers have to choose singly."""
        layers, latest = self.full_store.shape.layers, self.view.unscored_chunks(end, queries is not None)
        if latest is not None:
            return torch.arange(latest.start, latest.stop, device=self.full_store.device).expand(layers, 1, -1)
        assert queries is not None
        scorer, reduction = self.view.scorer, self.view.reduction
        supported = self.summaries is not None if scorer in SUMMARY_SCORERS else reduction != "max"
        if self._chooses is None or not supported:
            return None
        kept = None if self.summaries is None else self.summaries.for_slot(slot)
        stacked = _of(queries, slice(0, layers))
        stacked = stacked[:, :, -1:] if reduction == "last" else stacked
        text = self.full_store.keys, slot, end
        return self._chooses.select_chunks(
            scorer,
            reduction == "max",
            text,
            self.view.chunk_size,
            kept,
            stacked,
            self.view.candidate_chunks(end),
            self.view.num_chunks,
        )

    def _copy_each(self, slot: int, end: int, queries: Queries | None, chosen: torch.Tensor | None) -> int:
        """Copies the rows of the layers, as many at a time as may be; returns the number of rows."""
        kept = None if self.summaries is None else self.summaries.for_slot(slot)
        dtype, size = self.full_store.shape.dtype, 0
        for layers in layer_groups(self.full_store, self._bytes(end, queries)):
            keys, values = (x[:, :, :end] for x in slot_kv(self.full_store, layers, slot))
            if chosen is not None:
                rows = self.view.kv_indices(chosen[layers].to(keys.device), end)
            else:
                summaries = None if kept is None else {kind: x[layers] for kind, x in kept.items()}
                rows = self.view.select_kv_indices(
                    keys.to(dtype), None if queries is None else _of(queries, layers), summaries
                )
            size = rows.shape[-1]
            for source, target in ((keys, self.store.keys), (values, self.store.values)):
                target[layers, slot, :, :size] = gather_kv(source, rows).to(dtype)
        return size

    def _bytes(self, end: int, queries: Queries | None) -> int:
        """About how many bytes it takes to choose and copy the rows of a layer, beside the copies."""
        heads, size = self.full_store.shape.kv_heads, self.full_store.shape.head_dim
        copied = heads * self.view.capacity * size * self.full_store.shape.dtype.itemsize
        if queries is None or not self.view.num_chunks:
            return copied
        query_heads, count, _ = queries[0].shape
        if self.summaries is not None:
            scored = end // self.view.chunk_size
            return copied + 4 * scored * (2 * query_heads * count + heads * size)
        # Of one head after the other: its keys in float32, scores, weights and what is made of them.
        return copied + 4 * end * (3 * (query_heads // heads) * count + size)

    def invalidate(self, slot: int, start: int = 0) -> None:
        """Called when the text's rows from ``start`` on have been replaced or removed. No rows wait then."""
        self._cut(slot, start)
        self.store.truncate(slot, self._sizes[slot])
        if self.summaries is not None:
            self.summaries.invalidate(slot, start)

    def num_buffered(self, slot: int) -> int:
        return self.store.lengths[slot] - self._sizes[slot]

    def buffer_path(self, slot: int, path: Sequence[int]) -> None:
        """Lets the accepted path of a forward on the view wait, and shows it to drafters.

        The rows become unverified rows of the full store: inexact, and overwritten by its next verification.
        """
        start = self.store.lengths[slot]
        self.store.commit(slot, path)
        for states in self.full_store.states:
            states.commit(slot, self.full_store.readable_len(slot), path)
        rows = slice(start, start + len(path))
        features = None if self.store.features is None else self.store.features[slot, rows]
        keys, values = (
            x[:, slot, :, rows].to(self.full_store.shape.dtype) for x in (self.store.keys, self.store.values)
        )
        self.full_store.write_entries(slot, self.full_store.readable_len(slot), keys, values, features)
        self.full_store.num_unverified[slot] += len(path)

    def clear_buffer(self, slot: int) -> None:
        """Drops rows that wait, which no drafter was shown."""
        self.store.truncate(slot, self._sizes[slot])


def _of(queries: Queries, layers: slice) -> torch.Tensor:
    """The queries of some layers, (layers, Hq, M, d)."""
    if isinstance(queries, torch.Tensor):
        return queries[layers]
    return torch.stack([queries[layer] for layer in range(layers.start, layers.stop)])


def gather_kv(source: torch.Tensor, kv_indices: torch.Tensor) -> torch.Tensor:
    """Copies rows of a layer at once, or of several layers, whose dimension comes first.

    Args:
        source: (Hkv, n, d), with any strides.
        rows: (Hkv, m) int64, each KV head's own, or (1, m), the same for all.

    Returns:
        (Hkv, m, d).
    """
    outer = len(source.shape) - 2
    if kv_indices.shape[:-1].numel() == 1:
        return source.index_select(outer, kv_indices.flatten())
    sizes = enumerate(source.shape[:outer])
    places = [torch.arange(n, device=source.device).view(-1, *[1] * (outer - i)) for i, n in sizes]
    index = (*places, kv_indices)
    return source[index]
