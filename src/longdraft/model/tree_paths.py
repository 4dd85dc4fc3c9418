"""Paths in the trees of a block: the rows that each row comes after."""

from __future__ import annotations

import torch

from longdraft.attention.forward_batch import ForwardBatch


def tree_parents(block: ForwardBatch) -> list[list[int]]:
    """The parent of each of a tree's rows, for each sequence.

    -1 stands for the committed rows, -2 for the unknown parent of a row that no row of this block descends from.
    """
    found: list[list[int]] | None = block.metadata.get("parents")
    if found is None:
        if block.mask is None:
            found = [list(range(-1, block.tree_len - 1))] * block.batch_size
        else:
            found = [_parents_in(mask, block.tree_len) for mask in block.mask.tolist()]
        block.metadata["parents"] = found
    return found


def _parents_in(mask: list[list[bool]], width: int) -> list[int]:
    parents = [-2] * width
    for row in mask:
        before = -1
        for i, seen in enumerate(row):
            if seen:
                parents[i], before = before, i
    return parents


def with_ancestors(parents: list[int], offset: int) -> list[int]:
    """The rows from ``offset`` on and those that they descend from, in order."""
    found = set(range(offset, len(parents)))
    for row in range(offset, len(parents)):
        while (row := parents[row]) >= 0:
            found.add(row)
    return sorted(found)


def conv_input_indices(block: ForwardBatch, size: int) -> list[torch.Tensor]:
    """For each sequence (T, size): the last inputs on each row's path, its own included, where ``size - 1`` committed
    ones come before the tree's."""
    key = ("inputs", size)
    if key not in block.metadata:
        paths = [
            [_path(each, row, size) for row in range(block.tree_offset, block.tree_len)] for each in tree_parents(block)
        ]
        block.metadata[key] = [torch.tensor(path, dtype=torch.long, device=block.slots_t.device) for path in paths]
    found: list[torch.Tensor] = block.metadata[key]
    return found


def _path(parents: list[int], row: int, size: int) -> list[int]:
    places: list[int] = []
    before = size - 2
    while len(places) < size:
        if row >= 0:
            places.append(row + size - 1)
            row = parents[row]
        else:
            places.append(before)
            before -= 1
    return places[::-1]
