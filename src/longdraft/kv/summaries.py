"""Block summaries: what is kept of each block of keys, so that a block can be scored without reading it.

Element-wise maximum, minimum and mean of a block's keys after RoPE, per layer and KV head (SpecPV, section 3.2). They
follow the store: a block is summarised once, when all its rows are committed, and again where it was truncated.
"""

from __future__ import annotations

import torch

from longdraft.kv.store import KVStore


class BlockSummaries:
    """Summaries of the complete blocks of a store's committed rows.

    Args:
        store: whose keys.
        block: rows of a block.

    Attributes:
        largest, smallest, mean: (layers, slots, kv_heads, blocks, head_dim), a slot's first ``count(slot)`` blocks.
    """

    def __init__(self, store: KVStore, block: int) -> None:
        self.store, self.block = store, block
        shape = store.shape
        size = (shape.layers, store.slots, shape.kv_heads, store.capacity // block, shape.head_dim)
        self.largest = torch.empty(size, dtype=shape.dtype, device=store.device)
        self.smallest = torch.empty_like(self.largest)
        self.mean = torch.empty_like(self.largest)
        self._counts = [0] * store.slots

    def count(self, slot: int) -> int:
        """Blocks of a slot that are summarised."""
        return self._counts[slot]

    def update(self, slot: int) -> None:
        """Summarises the blocks that were completed since the last call."""
        old, new = self._counts[slot], self.store.lengths[slot] // self.block
        for layer in range(self.store.shape.layers if new > old else 0):
            keys, _ = self.store.layer(layer)
            # (Hkv, new blocks, block, d)
            rows = keys[slot, :, old * self.block : new * self.block].unflatten(1, (-1, self.block))
            self.largest[layer, slot, :, old:new] = rows.amax(2).to(self.largest.device)
            self.smallest[layer, slot, :, old:new] = rows.amin(2).to(self.largest.device)
            self.mean[layer, slot, :, old:new] = rows.float().mean(2).to(self.mean)
        self._counts[slot] = new

    def truncate(self, slot: int) -> None:
        """Forgets blocks that the slot's committed rows no longer fill; to be called whenever rows were taken back."""
        self._counts[slot] = min(self._counts[slot], self.store.lengths[slot] // self.block)
