"""Kernels for views: summaries of a text's chunks, the choice of chunks, and copies of rows. See views.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch

from longdraft.native.boundary import WHOLE, address
from longdraft.native.library import Kernels
from longdraft.native.operators import declared, launch
from longdraft.native.scaled import KeptRows
from longdraft.native.structures import KeysValues, Long, Pointer

# Scorers in the order of kernels.h; the first three read only summaries. And the kinds of summaries.
KINDS = ("mean-key", "minmax", "quest", "tokens", "attention", "snapkv")
BY_SUMMARIES = KINDS[:3]
SUMMARIES = ("largest", "smallest", "mean")


class _Summaries(ctypes.Structure):
    _fields_ = [
        *((name, Pointer) for name in SUMMARIES),
        *((name, Long) for name in ("layer", "head", "dim")),
    ]


class _Choice(ctypes.Structure):
    _fields_ = [
        *((name, Pointer) for name in SUMMARIES),
        *((name, Long) for name in ("layer", "head", "dim")),
        ("kv", ctypes.POINTER(KeysValues)),
        *((name, Long) for name in ("slot", "n", "chunk")),
        *((name, Long) for name in ("layers", "heads", "group", "rows", "d", "first", "behind", "count")),
        *((name, Long) for name in ("kind", "most")),
    ]


class ViewKernels:
    """Calls the kernels. Tensors are float32 on the CPU, d a multiple of 16.

    Summaries are a dict by kind of tensors (layers, KV heads, chunks, d) with equal strides, 1 for the chunks.
    """

    def __init__(self, kernels: Kernels) -> None:
        library, kv, threads = kernels.library, ctypes.POINTER(KeysValues), ctypes.c_int
        # keys; slot, layers, heads, d, chunk; summaries; from, to; threads
        summaries = ctypes.POINTER(_Summaries)
        self._summarise = declared(library, "summarise", kv, *(Long,) * 5, summaries, Long, Long, threads)
        self._choose = declared(library, "choose", ctypes.POINTER(_Choice), Pointer, Pointer, threads)
        # text, copy; slot, layers, heads, d; chosen, held; count, chunk, sink, window, end; threads
        places = (*(Long,) * 4, Pointer, Pointer, *(Long,) * 5)
        self._copy = declared(library, "copy_view", kv, kv, *places, threads)
        # text, copy; slot, layers, heads, d, from, to, count; threads
        self._rows = declared(library, "copy_rows", kv, kv, *(Long,) * 7, threads)

    def summarise(
        self, keys: torch.Tensor, slot: int, chunk: int, kept: Mapping[str, torch.Tensor], first: int, behind: int
    ) -> None:
        """Writes the summaries of chunks [first, behind) of a slot's keys (layers, slots, KV heads, capacity, d)."""
        layers, _, heads, _, d = keys.shape
        out = _Summaries(*_places(kept))
        arguments = (KeysValues.of(keys, keys), slot, layers, heads, d, chunk, out, first, behind)
        launch("summarise", [keys], self._summarise, *arguments, torch.get_num_threads())

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
        kv, span = KeysValues.of(keys, keys), (chunks.start, chunks.stop)
        where = (ctypes.pointer(kv), slot, n, chunk)
        choice = _Choice(*places, *where, *sizes, *span, count, KINDS.index(kind), int(most))
        arguments = (choice, address(queries), address(chosen, torch.long))
        launch("choose", [queries, chosen], self._choose, *arguments, torch.get_num_threads())
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
        kv = (KeysValues.of(*text), KeysValues.of(*copies))
        launch("copy_view", [*text], self._copy, *kv, *where, *sizes, torch.get_num_threads())

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
        kv = (KeysValues.of(*text), KeysValues.of(*copies))
        launch("copy_rows", [*text], self._rows, *kv, *where, torch.get_num_threads())


def _places(kept: Mapping[str, torch.Tensor]) -> tuple[int | None, ...]:
    """Addresses of the summaries, and their strides except that of the chunks."""
    layer, head, chunk, dim = next(iter(kept.values())).stride()
    assert chunk == 1
    return (*(address(kept[name].mT, rows=True) if name in kept else None for name in SUMMARIES), layer, head, dim)
