"""Paths that a CUDA graph moves lie where a commit puts them."""

from __future__ import annotations

import pytest
import torch

from longdraft.memory.store import KVShape, KVStore, StoreConfig


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("feature_layers", [(), (1,)])
def test_moved_paths_are_committed_paths(dtype, feature_layers):
    config = StoreConfig(feature_layers=feature_layers, feature_size=5, dtype=dtype)
    stores = [KVStore(KVShape(3, 2, 8, torch.float32), 4, 20, config=config) for _ in range(2)]
    slots, lengths, paths = [2, 0], [3, 6], [[0, 2, 5, 9], [0, 1, 3, 3]]  # the last 3 stays where it is
    num_accepted = [4, 3]
    for store in stores:
        generator = torch.Generator().manual_seed(0)
        for slot in range(4):
            kv = (torch.randn(3, 2, 20, 8, generator=generator) for _ in range(2))
            store.write_entries(slot, 0, *kv, torch.randn(20, 5, generator=generator))
        for slot, length in zip(slots, lengths, strict=True):
            store.lengths[slot] = length
    stores[0].move_paths(torch.tensor(slots), torch.tensor(lengths), torch.tensor(paths))
    for slot, path, count in zip(slots, paths, num_accepted, strict=True):
        stores[0].commit(slot, range(count))
        stores[1].commit(slot, path[:count])
    assert stores[0].lengths == stores[1].lengths
    for slot in range(4):
        moved, committed = (store.read_entries(slot, 0, store.lengths[slot]) for store in stores)
        assert torch.equal(moved.keys, committed.keys) and torch.equal(moved.values, committed.values)
        assert not feature_layers or torch.equal(moved.features, committed.features)
