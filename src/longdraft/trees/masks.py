"""Ancestor masks, which say which nodes of its tree a node may see: of trees, of batches, and of growing trees."""

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
    """Returns (B, size, size) bool on the host: True if the column is the row itself or an ancestor of it.

    Rows of padding see themselves alone.
    """
    # Numbers of the host: torch would take three calls for each node.
    rows: list[bytearray] = []
    for tree in trees:
        seen = [bytearray(size) for _ in range(size)]
        for node in range(size):
            if 0 < node < tree.size:
                seen[node][:] = seen[tree.parents[node]]
            seen[node][node] = 1
        rows += seen
    return torch.frombuffer(bytearray().join(rows), dtype=torch.bool).view(len(trees), size, size)


def make_tree_batch(
    store: KVStore, slots: Sequence[int], trees: Sequence[TokenTree], bases: Sequence[int] | None = None
) -> ForwardBatch:
    """Makes the block of a forward over a tree a slot; smaller trees are padded, and no node sees the padding.

    Args:
        bases: position of each root; None: behind the slot's committed rows.
    """
    if all(tree.is_chain for tree in trees):
        return store.make_forward_batch(slots, [tree.tokens for tree in trees], root_positions=bases)
    size = max(tree.size for tree in trees)
    padding = [size - tree.size for tree in trees]
    return store.make_forward_batch(
        slots,
        [tree.tokens + tree.tokens[:1] * n for tree, n in zip(trees, padding, strict=True)],
        root_positions=bases,
        depths=[tree.depths + (0,) * n for tree, n in zip(trees, padding, strict=True)],
        mask=padded_ancestor_mask(trees, size),
    )


class AncestorMask:
    """Masks of trees that are fed to a draft level by level, in one round of a batch."""

    def __init__(self) -> None:
        self._level: TreeLevel | None = None
        self._mask = torch.empty(0, **CPU_FLOAT32)

    def add(self, level: TreeLevel) -> torch.Tensor:
        """Adds a level; returns (B', W, S) bool on its device: which of the S nodes so far each of its W may see.

        The first level's nodes see themselves alone: a root may come first, or lie before the trees' rows.
        """
        batch, width = level.tokens.shape
        mask = _themselves(width, level.tokens.device).expand(batch, -1, -1)
        if self._level is not None:
            above = self._level.index_select(level.sequence_indices, self._mask)
            mask = torch.cat([above.gather(1, level.parents[..., None].expand(-1, -1, above.shape[2])), mask], dim=2)
        self._level, self._mask = level, mask
        return mask


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _themselves(width: int, device: torch.device) -> torch.Tensor:
    """The mask (W, W) of nodes that see themselves alone; kept for each width."""
    return torch.eye(width, dtype=torch.bool, device=device)
