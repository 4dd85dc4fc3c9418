"""Kernels for views of a KV cache (views.cpp): they summarize chunks of keys, select chunks, and copy entries."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch

from longdraft.native.boundary import CPU_INT64, address
from longdraft.native.header import ENUMS
from longdraft.native.library import Kernels
from longdraft.native.quantized_kv import KVPair
from longdraft.native.structures import kv_struct, make_struct

SCORERS = tuple(name.lower().replace("_", "-") for name in ENUMS["Scorer"])  # mean-key, minmax, quest, tokens, ...
SUMMARY_SCORERS = SCORERS[:3]  # scorers that read only summaries, not keys
# Name of a summary -> its field of ChunkSummaries (kernels.h).
SUMMARY_NAMES = {"largest": "max", "smallest": "min", "mean": "mean"}
# Name in SUMMARY_NAMES -> (layers, KV heads, chunks, d). All have the same strides; that of chunks is 1.
Summaries = Mapping[str, torch.Tensor]


class ViewKernels:
    """Calls the kernels. Tensors are float32 on the CPU; d, the size of a head, is a multiple of 16."""

    def __init__(self, kernels: Kernels) -> None:
        self._call = kernels.call

    def summarize_chunks(
        self, keys: torch.Tensor, slot: int, chunk_size: int, summaries: Summaries, first_chunk: int, end_chunk: int
    ) -> None:
        """Summarizes chunks [first_chunk, end_chunk) of a slot's keys (layers, slots, KV heads, capacity, d)."""
        layers, _, heads, _, d = keys.shape
        out = make_struct("ChunkSummaries", **_summary_fields(summaries))
        sizes = (layers, heads, d, chunk_size)
        self._call("summarize_chunks", kv_struct(keys, keys), slot, *sizes, out, first_chunk, end_chunk)

    def select_chunks(
        self,
        scorer: str,
        use_max: bool,
        cached_keys: tuple[torch.Tensor, int, int],
        chunk_size: int,
        summaries: Summaries | None,
        queries: torch.Tensor,
        candidates: range,
        count: int,
    ) -> torch.Tensor:
        """Returns ids of the ``count`` chunks of ``candidates`` with the highest scores, ascending.

        Args:
            scorer: one of :data:`SCORERS`.
            use_max: how scores are reduced over queries: True: to their maximum, only with :data:`SUMMARY_SCORERS`;
                False: to their mean.
            cached_keys: keys (layers, slots, KV heads, capacity, d), the slot, and the number of its KV entries.
            summaries: summaries of the chunks; None for scorers that read keys.
            queries: (layers, query heads, queries of a head, d).
            candidates: ids of the chunks to select from.

        Returns:
            (layers, KV heads, count) int64.
        """
        keys, slot, kv_len = cached_keys
        layers, _, heads, _, d = keys.shape
        assert scorer in SUMMARY_SCORERS or not use_max
        if scorer == "mean-key" and not use_max:  # q . k is linear in q, so the mean query gives the mean score
            queries = queries.unflatten(1, (heads, -1)).mean((2, 3), keepdim=True).flatten(1, 2)
        elif scorer in ("attention", "snapkv"):
            queries = queries * d**-0.5
        queries = queries.float().contiguous()
        chunk_ids = torch.empty(layers, heads, count, **CPU_INT64)
        selection = make_struct(
            "ChunkSelection", **({} if summaries is None else _summary_fields(summaries)),
            kv=ctypes.pointer(kv_struct(keys, keys)), slot=slot, kv_len=kv_len, chunk_size=chunk_size,
            n_layers=layers, n_kv_heads=heads, group_size=queries.shape[1] // heads, n_queries=queries.shape[2], d=d,
            first_chunk=candidates.start, end_chunk=candidates.stop, n_selected=count,
            scorer=SCORERS.index(scorer), use_max=use_max,
        )  # fmt: skip
        self._call("select_chunks", selection, address(queries), address(chunk_ids, torch.long))
        return chunk_ids

    def copy_view(
        self,
        source: KVPair,
        view_kv: KVPair,
        slot: int,
        chunk_ids: torch.Tensor,
        resident_chunks: torch.Tensor,
        chunk_size: int,
        sink: int,
        window: range,
    ) -> None:
        """Copies a slot's first ``sink`` entries, then the selected chunks, then the entries of ``window`` to the view.

        Args:
            source, view_kv: keys and values (layers, slots, KV heads, capacity, d), values contiguous. The view may
                have another dtype and transposed keys.
            chunk_ids: ids of the selected chunks (layers, KV heads, count), ascending.
            resident_chunks: ids of the chunks in the view, shaped like ``chunk_ids``; -1 for none. The kernel updates
                them. Selected chunks that are resident are not copied but stay in place.
            window: indices of the last entries that the view gets.
        """
        layers, _, heads, _, d = source[0].shape
        sizes = (chunk_ids.shape[2], chunk_size, sink, window.start, window.stop)
        chunks = address(chunk_ids, torch.long), address(resident_chunks, torch.long)
        self._call("copy_view", kv_struct(*source), kv_struct(*view_kv), slot, layers, heads, d, *chunks, *sizes)

    def copy_entries(self, source: KVPair, view_kv: KVPair, slot: int, positions: range, destination: int) -> None:
        """Copies a slot's entries at ``positions`` to the view's entries from ``destination`` on, as in copy_view()."""
        layers, _, heads, _, d = source[0].shape
        sizes = (slot, layers, heads, d, positions.start, destination, len(positions))
        self._call("copy_entries", kv_struct(*source), kv_struct(*view_kv), *sizes)


def _summary_fields(summaries: Summaries) -> dict[str, int | None]:
    """Returns the fields of ChunkSummaries: addresses of summaries, and strides of layers, heads and dimensions."""
    layer, head, chunk, dim = next(iter(summaries.values())).stride()
    assert chunk == 1
    data = {SUMMARY_NAMES[name]: address(summary.mT, strided_rows=True) for name, summary in summaries.items()}
    return {**data, "layer_stride": layer, "head_stride": head, "dim_stride": dim}
