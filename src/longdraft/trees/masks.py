"""Tree attention masks: each node attends to itself and its ancestors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from longdraft.attention.forward_batch import ForwardBatch
from longdraft.memory.store import KVStore
from longdraft.native.boundary import CPU_FLOAT32
from longdraft.trees.level import TreeLevel
from longdraft.trees.tree import TokenTree


def padded_ancestor_mask(trees: Sequence[TokenTree], size: int) -> torch.Tensor:
    """Returns (number of trees, size, size) bool on the host: [b, i, j] is True if node i of tree b attends to node j.
    Padding nodes attend to themselves only."""
    # Built in bytearrays: torch operations for each node are slow.
    rows: list[bytearray] = []
    for tree in trees:
        tree_rows = [bytearray(size) for _ in range(size)]
        for node in range(size):  # a node attends to what its parent attends to, and to itself
            if 0 < node < tree.size:
                tree_rows[node][:] = tree_rows[tree.parents[node]]
            tree_rows[node][node] = 1
        rows += tree_rows
    return torch.frombuffer(bytearray().join(rows), dtype=torch.bool).view(len(trees), size, size)


def make_tree_batch(
    store: KVStore, slots: Sequence[int], trees: Sequence[TokenTree], root_positions: Sequence[int] | None = None
) -> ForwardBatch:
    """Makes the batch of a forward over one tree for each slot. Smaller trees are padded; no real node attends
    to padding. ``root_positions``: position of each root; None: the position after the slot's committed tokens."""
    if all(tree.is_chain for tree in trees):
        return store.make_forward_batch(slots, [tree.tokens for tree in trees], root_positions=root_positions)
    size = max(tree.size for tree in trees)
    num_padding = [size - tree.size for tree in trees]
    return store.make_forward_batch(
        slots,
        [tree.tokens + tree.tokens[:1] * n for tree, n in zip(trees, num_padding, strict=True)],
        root_positions=root_positions,
        depths=[tree.depths + (0,) * n for tree, n in zip(trees, num_padding, strict=True)],
        mask=padded_ancestor_mask(trees, size),
    )


class AncestorMask:
    """The attention mask of a batch's trees, which a draft grows level by level in one round."""

    def __init__(self) -> None:
        self._level: TreeLevel | None = None
        self._mask = torch.empty(0, **CPU_FLOAT32)  # a placeholder, which add() replaces

    def add(self, level: TreeLevel) -> torch.Tensor:
        """Adds a level of W nodes. Returns its mask over all S nodes so far, (B, W, S) bool: True where a new node
        attends to an old or new one. B: the sequences that still grow. In the first level, a node sees itself only."""
        batch_size, width = level.tokens.shape
        mask = _identity_mask(width, level.tokens.device).expand(batch_size, -1, -1)
        if self._level is not None:
            last_mask = self._level.index_select(level.sequence_indices, self._mask)
            parent_mask = last_mask.gather(1, level.parents[..., None].expand(-1, -1, last_mask.shape[2]))
            mask = torch.cat([parent_mask, mask], dim=2)
        self._level, self._mask = level, mask
        return mask


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # so that the cached tensor may be used outside inference mode too
def _identity_mask(width: int, device: torch.device) -> torch.Tensor:
    """Returns the mask (width, width) of nodes that attend to themselves only; cached."""
    return torch.eye(width, dtype=torch.bool, device=device)
