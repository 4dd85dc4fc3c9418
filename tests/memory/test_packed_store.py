"""A store of rounded rows: what a plain one does, each row rounded when it is written."""

from __future__ import annotations

import pytest
import torch

from longdraft.errors import MemoryBudgetError
from longdraft.memory import sizes
from longdraft.memory.packed_store import PackedStore
from longdraft.memory.store import KVShape, KVStore
from longdraft.native.scaled import Scaled
from longdraft.views import cache
from longdraft.views.cache import TrueCache
from longdraft.views.view import View

SHAPE = KVShape(layers=2, kv_heads=3, head_dim=16, dtype=torch.float32)


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return Scaled.of(x).to(x.dtype) if dtype == torch.int8 else x.to(dtype).to(x.dtype)


def same(packed: PackedStore, plain: KVStore, slot: int, dtype: torch.dtype) -> None:
    n = plain.lengths[slot]
    assert packed.lengths[slot] == n and packed.keys.dtype == dtype
    for own, wanted in ((packed.keys, plain.keys), (packed.values, plain.values)):
        assert torch.equal(own[:, slot, :, :n].to(torch.float32), rounded(wanted[:, slot, :, :n], dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_rows_are_written_moved_and_taken_back(dtype):
    packed, plain = PackedStore(SHAPE, 2, 40, dtype, (1,), 8), KVStore(SHAPE, 2, 40, "cpu", True, (1,), 8)
    rows = [torch.randn(2, 3, 12, 16) for _ in range(2)]
    tree = [torch.randn(2, 2, 3, 5, 16) for _ in range(2)]
    features = torch.randn(2, 5, 8)
    for store in (packed, plain):
        store.put_rows(1, 0, *rows)
        store.commit(1, range(12))
        block = store.block([1, 0], [[1, 2, 3, 4, 5]] * 2)
        for layer in range(2):
            store.write(layer, tree[0][layer], tree[1][layer], block)
        store.write_features({1: features}, block)
        store.commit(1, [0, 2, 4])
        store.commit(0, [1, 3])
        store.truncate(1, 14)
    same(packed, plain, 0, dtype)
    same(packed, plain, 1, dtype)
    assert torch.equal(packed.features[1, 12:14], features[0, [0, 2]])  # as they are


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_a_view_holds_the_texts_rows_rounded(dtype, monkeypatch):
    # Copies by our kernels have their chunks in another order.
    monkeypatch.setattr(cache, "view_kernels", lambda *stores: None)
    full = KVStore(SHAPE, 1, 100, transposed_keys=True)
    views = [
        TrueCache(full, lambda slots, rows: KVStore(SHAPE, slots, rows), View("tokens", 9, 4, 3, room=8), 5),
        TrueCache(full, lambda slots, rows: PackedStore(SHAPE, slots, rows, dtype), View("tokens", 9, 4, 3, room=8), 5),
    ]
    queries = [torch.randn(6, 1, 16)] * 2
    for count in (40, 3, 2, 30):
        full.put_rows(0, full.lengths[0], *(torch.randn(2, 3, count, 16) for _ in range(2)))
        full.commit(0, range(count))
        chosen = [view.update(0, queries) for view in views]
        assert chosen[0] == chosen[1]
        same(views[1].store, views[0].store, 0, dtype)
    # What waits is shown to drafters as what it stands for.
    start = views[1].store.lengths[0]
    rows = [torch.randn(2, 3, 2, 16) for _ in range(2)]
    views[1].store.put_rows(0, start, *rows)
    views[1].keep(0, [1])
    assert torch.equal(full.keys[:, 0, :, 75], rounded(rows[0][:, :, 1], dtype))


def test_memory_that_is_not_there(monkeypatch):
    asked: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(sizes, "require", lambda size, device, what: asked.append(size))
        PackedStore(SHAPE, 1, 100, torch.int8)
    assert asked == [2 * 2 * 3 * 100 * (16 + 4)]  # scales included
    monkeypatch.setattr(sizes, "available_bytes", lambda device: 10)
    with pytest.raises(MemoryBudgetError, match="A cache of 100 tokens"):
        PackedStore(SHAPE, 1, 100, torch.int8)
