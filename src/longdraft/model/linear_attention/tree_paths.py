"""Finds paths in the trees of a batch: parents, ancestors, and the inputs that convolutions read along a path."""

from __future__ import annotations

import torch

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.native.recurrent import TreeOrder

_PREFIX, _UNKNOWN = -1, -2  # instead of a parent node: the committed prefix; not known


def tree_parents(batch: ForwardBatch) -> list[list[int]]:
    """Returns, for each sequence, the parent of each tree node; _PREFIX (-1) for a root, _UNKNOWN (-2) if not known.

    A batch has a tree's nodes from ``tree_offset`` on. The mask shows the paths to these nodes, so parents are known of
    all nodes on these paths. Other nodes before ``tree_offset`` have unknown parents."""
    parents: list[list[int]] | None = batch.metadata.get("parents")
    if parents is None:
        if batch.mask is None:
            parents = [list(range(_PREFIX, batch.tree_len - 1))] * batch.batch_size  # chains
        else:
            parents = [_parents_from_mask(mask, batch.tree_len) for mask in batch.mask.tolist()]
        batch.metadata["parents"] = parents
    return parents


def _parents_from_mask(mask: list[list[bool]], tree_len: int) -> list[int]:
    """Returns each tree node's parent. In ``mask``, a row has True for the nodes on the path to a node of the batch."""
    parents = [_UNKNOWN] * tree_len
    for mask_row in mask:
        parent = _PREFIX
        for node, is_on_path in enumerate(mask_row):
            if is_on_path:
                parents[node], parent = parent, node
    return parents


def with_ancestors(parents: list[int], offset: int) -> list[int]:
    """Returns the nodes from ``offset`` on and all their ancestors, ascending. Parents come before their children."""
    nodes = set(range(offset, len(parents)))
    for node in range(offset, len(parents)):
        while (node := parents[node]) >= 0:
            nodes.add(node)
    return sorted(nodes)


def tree_orders(batch: ForwardBatch) -> list[TreeOrder]:
    """Returns, for each sequence, the order in which the kernels compute its new tokens."""
    start = batch.tree_offset
    return [TreeOrder(parents, with_ancestors(parents, start), start) for parents in tree_parents(batch)]


def conv_input_indices(batch: ForwardBatch, kernel_size: int) -> list[torch.Tensor]:
    """Returns, for each sequence, indices (T, kernel_size) of the inputs that a convolution reads for each token.
    These are the last inputs on the path to the token. The indices count first the last ``kernel_size - 1`` committed
    inputs, then the inputs of the tree's nodes."""
    key = ("conv_input_indices", kernel_size)
    if key not in batch.metadata:
        nodes = range(batch.tree_offset, batch.tree_len)
        paths = [[_input_path(parents, node, kernel_size) for node in nodes] for parents in tree_parents(batch)]
        batch.metadata[key] = [torch.tensor(path, dtype=torch.long, device=batch.slots_t.device) for path in paths]
    indices: list[torch.Tensor] = batch.metadata[key]
    return indices


def _input_path(parents: list[int], node: int, kernel_size: int) -> list[int]:
    """Returns the indices that :func:`conv_input_indices` has for one node."""
    indices: list[int] = []
    prefix_index = kernel_size - 2  # index of the last committed input
    while len(indices) < kernel_size:
        if node >= 0:
            indices.append(node + kernel_size - 1)
            node = parents[node]
        else:
            indices.append(prefix_index)
            prefix_index -= 1
    return indices[::-1]
