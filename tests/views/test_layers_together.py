"""On a GPU the layers are selected and copied in groups: the same entries, with few launches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longdraft.memory.store import KVShape, KVStore
from longdraft.views.scorers import SCORERS
from longdraft.views.sparse_kv_cache import SparseKVCache
from longdraft.views.view import View
from tests.support.simulated_gpu import DEVICE, SimulatedTensor, simulate_gpu

SHAPE = KVShape(layers=2, kv_heads=2, head_dim=4, dtype=torch.float32)
CHOOSING = [name for name, scorer in SCORERS.items() if scorer is not None]


def filled(shape: KVShape, device: torch.device) -> tuple[KVStore, torch.Tensor]:
    """A store with 90 entries in its second slot, and queries of all layers."""
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 8, shape.kv_heads, 90, shape.head_dim, generator=random)[:, : shape.layers]
    queries = torch.randn(8, 4, 3, shape.head_dim, generator=random)[: shape.layers]
    store = KVStore(shape, 2, 100, device)
    if device == DEVICE:
        rows, queries = SimulatedTensor(rows), SimulatedTensor(queries)
    store.write_entries(1, 0, *rows)
    store.commit(1, range(90))
    return store, queries


def cache_of(store: KVStore, scorer: str, shared: bool) -> SparseKVCache:
    view = View(scorer, 12, 4, 4, 2, max_new=8, shared_by_heads=shared)
    return SparseKVCache(store, lambda slots, rows: KVStore(store.shape, slots, rows, store.device), view, 3)


@torch.inference_mode()
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("scorer", CHOOSING)
def test_grouped_layers_select_the_same_with_fewer_launches(scorer, shared, monkeypatch):
    launches = []
    for layers in (2, 8):
        shape = replace(SHAPE, layers=layers)
        alone = cache_of(*filled(shape, torch.device("cpu"))[:1], scorer, shared)
        alone.reselect(1, filled(shape, torch.device("cpu"))[1])
        with simulate_gpu(monkeypatch) as found:
            store, queries = filled(shape, DEVICE)
            cache = cache_of(store, scorer, shared)
            found.launches = 0
            cache.reselect(1, queries)
            launches.append(found.launches)
            assert not found.waits
            size = cache.store.lengths[1]
            rows = [x[:, 1, :, :size].cpu() for x in (cache.store.keys, cache.store.values)]
        own = [x[:, 1, :, :size] for x in (alone.store.keys, alone.store.values)]
        assert alone.store.lengths[1] == size and all(map(torch.equal, rows, own))
    assert launches[0] == launches[1]
