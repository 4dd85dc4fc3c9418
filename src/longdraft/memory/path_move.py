"""Moves the KV entries of accepted paths into place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from longdraft.attention.transfer import to_device


def move_path(start: int, path: Sequence[int], tensors_from: Callable[[int], Iterable[torch.Tensor]]) -> None:
    """Moves the entries of an accepted path to ``start``, in path order.

    Args:
        start: number of entries before the path's first entry.
        path: indices of the accepted entries, counted from ``start``, strictly increasing.
        tensors_from: returns the tensors (..., entries, size), of which entries from its argument on are changed.
    """
    # Entries at the path's beginning that are already in place (all entries of a chain) are not moved.
    num_in_place = next((i for i, index in enumerate(path) if index != i), len(path))
    if num_in_place == len(path):
        return
    indices = [start + index for index in path[num_in_place:]]
    sources: dict[torch.device, torch.Tensor] = {}  # the indices on each device of the tensors
    for entries in tensors_from(start + num_in_place):
        dim = len(entries.shape) - 2
        target = (*[slice(None)] * dim, slice(start + num_in_place, start + len(path)))
        if entries.device not in sources:
            sources[entries.device] = to_device(indices, entries.device)
        entries[target] = entries.index_select(dim, sources[entries.device])


def move_paths(tensors: Iterable[torch.Tensor], slots: torch.Tensor, starts: torch.Tensor, paths: torch.Tensor) -> None:
    """Does the same for several sequences, in a CUDA graph: no number is on the host.

    Args:
        tensors: (slots, entries, ...) or (layers, slots, entries, heads, size), whose entries are moved.
        slots: (B,) slot of each sequence.
        starts: (B,) number of entries before each path's first entry.
        paths: (B, P) indices of the entries to move to the places 0 to P - 1, counted from ``starts``.
    """
    sources = starts[:, None] + paths
    targets = starts[:, None] + torch.arange(paths.shape[1], device=paths.device)
    for entries in tensors:
        outer = (slice(None),) if len(entries.shape) == 5 else ()
        entries[outer + (slots[:, None], targets)] = entries[outer + (slots[:, None], sources)]  # noqa: RUF005
