"""Kernels for views: summaries of a text's chunks, the choice of chunks, and copies of rows. See views.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch

from longdraft.native.boundary import WHOLE, address
from longdraft.native.header import ENUMS, STRUCTURES
from longdraft.native.library import Kernels
from longdraft.native.scaled import KeptRows
from longdraft.native.structures import keys_values

# Scorers; the first three read only summaries. And the kinds of summaries.
KINDS = tuple(name.lower().replace("_", "-") for name in ENUMS["Scorer"])
BY_SUMMARIES = KINDS[:3]
SUMMARIES = ("largest", "smallest", "mean")


class ViewKernels:
    """Calls the kernels. Tensors are float32 on the CPU, d a multiple of 16.

    Summaries are a dict by kind of tensors (layers, KV heads, chunks, d) with equal strides, 1 for the chunks.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._call = kernels.call

    def summarise(
        self, keys: torch.Tensor, slot: int, chunk: int, kept: Mapping[str, torch.Tensor], first: int, behind: int
    ) -> None:
        """Writes the summaries of chunks [first, behind) of a slot's keys (layers, slots, KV heads, capacity, d)."""
        layers, _, heads, _, d = keys.shape
        out = STRUCTURES["Summaries"](*_places(kept))
        self._call("summarise", keys_values(keys, keys), slot, layers, heads, d, chunk, out, first, behind)

    def choose(
        self,
        kind: str,
        most: bool,
        text: tuple[torch.Tensor, int, int],
        chunk: int,
        kept: Mapping[str, torch.Tensor] | None,
        queries: torch.Tensor,
        chunks: range,
        count: int,
    ) -> torch.Tensor:
        """The ``count`` chunks of the range ``chunks`` with the highest scores.

        Args:
            kind: one of :data:`KINDS`.
            most: a chunk's score is the maximum over all queries, not the mean; only for kinds that read summaries.
            text: keys (layers, slots, KV heads, capacity, d), the slot, and its number of rows.
            chunk: rows of a chunk.
            kept: summaries; None for kinds that read keys.
            queries: (layers, query heads, M, d).

        Returns:
            (layers, KV heads, count) int64 chunk indices in ascending order.
        """
        keys, slot, n = text
        layers, _, heads, _, d = keys.shape
        assert kind in BY_SUMMARIES or not most
        if kind == "mean-key" and not most:  # q . k is linear in q
            queries = queries.unflatten(1, (heads, -1)).mean((2, 3), keepdim=True).flatten(1, 2)
        elif kind in ("attention", "snapkv"):
            queries = queries * d**-0.5
        queries = queries.float().contiguous()
        sizes = (layers, heads, queries.shape[1] // heads, queries.shape[2], d)
        chosen = torch.empty(layers, heads, count, **WHOLE)
        places = (None, None, None, 0, 0, 0) if kept is None else _places(kept)
        where = (ctypes.pointer(keys_values(keys, keys)), slot, n, chunk)
        which = (chunks.start, chunks.stop, count, KINDS.index(kind), int(most))
        choice = STRUCTURES["Choice"](*places, *where, *sizes, *which)
        self._call("choose", choice, address(queries), address(chosen, torch.long))
        return chosen

    def copy(
        self,
        text: tuple[torch.Tensor, torch.Tensor],
        copies: tuple[KeptRows, KeptRows],
        slot: int,
        chosen: torch.Tensor,
        held: torch.Tensor,
        chunk: int,
        sink: int,
        window: range,
    ) -> None:
        """Copies the first ``sink`` rows of a slot, its chosen chunks and its window, one after the other.

        Args:
            text, copies: keys and values (layers, slots, KV heads, capacity, d), the values by row; copies may be
                rounded, with keys stored column-wise.
            chosen: (layers, KV heads, count) chunks in ascending order.
            held: like ``chosen``, the chunk in each place of the copy, -1 for none. It is updated; chunks that are
                chosen again stay in their places.
        """
        layers, _, heads, _, d = text[0].shape
        sizes = (chosen.shape[2], chunk, sink, window.start, window.stop)
        where = (slot, layers, heads, d, address(chosen, torch.long), address(held, torch.long))
        self._call("copy_view", keys_values(*text), keys_values(*copies), *where, *sizes)

    def copy_rows(
        self,
        text: tuple[torch.Tensor, torch.Tensor],
        copies: tuple[KeptRows, KeptRows],
        slot: int,
        rows: range,
        to: int,
    ) -> None:
        """Copies rows of a slot to its copy, starting at row ``to``. Text and copies are as for :meth:`copy`."""
        layers, _, heads, _, d = text[0].shape
        where = (slot, layers, heads, d, rows.start, to, len(rows))
        self._call("copy_rows", keys_values(*text), keys_values(*copies), *where)


def _places(kept: Mapping[str, torch.Tensor]) -> tuple[int | None, ...]:
    """Addresses of the summaries, and their strides except that of the chunks."""
    layer, head, chunk, dim = next(iter(kept.values())).stride()
    assert chunk == 1
    return (*(address(kept[name].mT, rows=True) if name in kept else None for name in SUMMARIES), layer, head, dim)
