"""Paths in the trees of a batch: parents, ancestors, and the inputs that convolutions read along a path."""

from __future__ import annotations

import torch

from longdraft.attention.forward_batch import ForwardBatch


def tree_parents(batch: ForwardBatch) -> list[list[int]]:
    """For each sequence, each tree node's parent; -1 is the committed prefix, and -2 is unknown.

    A batch holds a tree's nodes from ``tree_offset`` on. Its mask shows the parents of these nodes and their ancestors;
    those of the other earlier nodes are unknown."""
    parents: list[list[int]] | None = batch.metadata.get("parents")
    if parents is None:
        if batch.mask is None:
            parents = [list(range(-1, batch.tree_len - 1))] * batch.batch_size
        else:
            parents = [_parents_from_mask(mask, batch.tree_len) for mask in batch.mask.tolist()]
        batch.metadata["parents"] = parents
    return parents


def _parents_from_mask(mask: list[list[bool]], tree_len: int) -> list[int]:
    """Parents from a mask with a row for each node of the batch: the True columns are its path, itself included."""
    parents = [-2] * tree_len
    for mask_row in mask:
        parent = -1
        for node, is_on_path in enumerate(mask_row):
            if is_on_path:
                parents[node], parent = parent, node
    return parents


def with_ancestors(parents: list[int], offset: int) -> list[int]:
    """The nodes from ``offset`` on and all their ancestors, in order."""
    nodes = set(range(offset, len(parents)))
    for node in range(offset, len(parents)):
        while (node := parents[node]) >= 0:
            nodes.add(node)
    return sorted(nodes)


def conv_input_indices(batch: ForwardBatch, kernel_size: int) -> list[torch.Tensor]:
    """For each sequence (T, kernel_size): indices of the last inputs on each token's path, its own included.

    The indexed inputs are the last ``kernel_size - 1`` committed ones, and behind them those of the tree's nodes."""
    key = ("inputs", kernel_size)
    if key not in batch.metadata:
        nodes = range(batch.tree_offset, batch.tree_len)
        paths = [[_input_path(parents, node, kernel_size) for node in nodes] for parents in tree_parents(batch)]
        batch.metadata[key] = [torch.tensor(path, dtype=torch.long, device=batch.slots_t.device) for path in paths]
    indices: list[torch.Tensor] = batch.metadata[key]
    return indices


def _input_path(parents: list[int], node: int, kernel_size: int) -> list[int]:
    indices: list[int] = []
    prefix_index = kernel_size - 2  # of the last committed input
    while len(indices) < kernel_size:
        if node >= 0:
            indices.append(node + kernel_size - 1)
            node = parents[node]
        else:
            indices.append(prefix_index)
            prefix_index -= 1
    return indices[::-1]
