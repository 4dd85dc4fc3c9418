"""Kernels for views: summaries of a text's chunks, the choice of chunks, and copies of rows. See views.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch

from longdraft.native.boundary import CPU_INT64, address
from longdraft.native.header import ENUMS, STRUCTURES
from longdraft.native.int8_kv import KVTensor
from longdraft.native.library import Kernels
from longdraft.native.structures import kv_struct

# Scorers; the first three read only summaries. And the kinds of summaries.
SCORERS = tuple(name.lower().replace("_", "-") for name in ENUMS["Scorer"])
SUMMARY_SCORERS = SCORERS[:3]
SUMMARY_NAMES = ("largest", "smallest", "mean")


class ViewKernels:
    """Calls the kernels. Tensors are float32 on the CPU, d a multiple of 16.

    Summaries are a dict by kind of tensors (layers, KV heads, chunks, d) with equal strides, 1 for the chunks.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._call = kernels.call

    def summarize_chunks(
        self,
        keys: torch.Tensor,
        slot: int,
        chunk_size: int,
        summaries: Mapping[str, torch.Tensor],
        first_chunk: int,
        end_chunk: int,
    ) -> None:
        """Writes the summaries of chunks [first, behind) of a slot's keys (layers, slots, KV heads, capacity, d)."""
        layers, _, heads, _, d = keys.shape
        out = STRUCTURES["Summaries"](*_places(summaries))
        self._call("summarise", kv_struct(keys, keys), slot, layers, heads, d, chunk_size, out, first_chunk, end_chunk)

    def select_chunks(
        self,
        scorer: str,
        use_max: bool,
        source: tuple[torch.Tensor, int, int],
        chunk_size: int,
        summaries: Mapping[str, torch.Tensor] | None,
        queries: torch.Tensor,
        candidates: range,
        count: int,
    ) -> torch.Tensor:
        """The ``count`` chunks of the range ``candidates`` with the highest scores.

        Args:
            kind: one of :data:`SCORERS`.
            most: a chunk's score is the maximum over all queries, not the mean; only for kinds that read summaries.
            text: keys (layers, slots, KV heads, capacity, d), the slot, and its number of rows.
            chunk: rows of a chunk.
            kept: summaries; None for kinds that read keys.
            queries: (layers, query heads, M, d).

        Returns:
            (layers, KV heads, count) int64 chunk indices in ascending order.
        """
        keys, slot, n = source
        layers, _, heads, _, d = keys.shape
        assert scorer in SUMMARY_SCORERS or not use_max
        if scorer == "mean-key" and not use_max:  # q . k is linear in q
            queries = queries.unflatten(1, (heads, -1)).mean((2, 3), keepdim=True).flatten(1, 2)
        elif scorer in ("attention", "snapkv"):
            queries = queries * d**-0.5
        queries = queries.float().contiguous()
        sizes = (layers, heads, queries.shape[1] // heads, queries.shape[2], d)
        chosen = torch.empty(layers, heads, count, **CPU_INT64)
        places = (None, None, None, 0, 0, 0) if summaries is None else _places(summaries)
        where = (ctypes.pointer(kv_struct(keys, keys)), slot, n, chunk_size)
        which = (candidates.start, candidates.stop, count, SCORERS.index(scorer), int(use_max))
        choice = STRUCTURES["Choice"](*places, *where, *sizes, *which)
        self._call("choose", choice, address(queries), address(chosen, torch.long))
        return chosen

    def copy_view(
        self,
        source: tuple[torch.Tensor, torch.Tensor],
        view_kv: tuple[KVTensor, KVTensor],
        slot: int,
        chunk_ids: torch.Tensor,
        resident_chunks: torch.Tensor,
        chunk_size: int,
        sink: int,
        window: range,
    ) -> None:
        """Copies the first ``sink`` rows of a slot, its chosen chunks and its window, one after the other.

        Args:
            text, copies: keys and values (layers, slots, KV heads, capacity, d), the values by row; copies may be
                rounded, with keys stored column-wise.
            chosen: (layers, KV heads, count) chunks in ascending order.
            held: like ``chunk_ids``, the chunk in each place of the copy, -1 for none. It is updated; chunks that are
                chosen again stay in their places.
        """
        layers, _, heads, _, d = source[0].shape
        sizes = (chunk_ids.shape[2], chunk_size, sink, window.start, window.stop)
        where = (slot, layers, heads, d, address(chunk_ids, torch.long), address(resident_chunks, torch.long))
        self._call("copy_view", kv_struct(*source), kv_struct(*view_kv), *where, *sizes)

    def copy_entries(
        self,
        source: tuple[torch.Tensor, torch.Tensor],
        view_kv: tuple[KVTensor, KVTensor],
        slot: int,
        positions: range,
        destination: int,
    ) -> None:
        """Copies rows of a slot to its copy, starting at row ``destination``. Text and copies are as for :meth:`copy_view`."""
        layers, _, heads, _, d = source[0].shape
        where = (slot, layers, heads, d, positions.start, destination, len(positions))
        self._call("copy_rows", kv_struct(*source), kv_struct(*view_kv), *where)


def _places(kept: Mapping[str, torch.Tensor]) -> tuple[int | None, ...]:
    """Addresses of the summaries, and their strides except that of the chunks."""
    layer, head, chunk, dim = next(iter(kept.values())).stride()
    assert chunk == 1
    return (
        *(address(kept[name].mT, strided_rows=True) if name in kept else None for name in SUMMARY_NAMES),
        layer,
        head,
        dim,
    )
