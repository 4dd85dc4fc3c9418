"""Moves the KV entries of an accepted path into place."""

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
