"""The view's KV: copies of exact rows, whatever was chosen, appended and taken back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longdraft.drafters.self_cache import SparseCache
from longdraft.drafters.self_views import VIEWS, SparseView
from longdraft.kv.disk_store import DiskStore
from longdraft.kv.store import KVShape, KVStore

SHAPE = KVShape(layers=2, kv_heads=2, head_dim=4, dtype=torch.float32)


def fill(store: KVStore, slot: int, start: int, end: int, seed: int) -> None:
    """Rows whose values say layer, head and position; keys are random."""
    keys = torch.randn(2, 2, end - start, 4, generator=torch.Generator().manual_seed(seed))
    values = torch.arange(start, end, dtype=torch.float32)[None, None, :, None].expand(2, 2, -1, 4).clone()
    values += 1e5 * torch.arange(2)[:, None, None, None] + 1e4 * torch.arange(2)[None, :, None, None]
    store.put_rows(slot, start, keys, values)


def positions(cache: SparseCache, slot: int, layer: int, head: int) -> list[int]:
    """Which positions a slot's rows hold; that keys and values are those of the full store is checked."""
    n = cache.store.lengths[slot]
    values = cache.store.values[layer, slot, head, :n]
    rows = (values[:, 0] - 1e5 * layer - 1e4 * head).long()
    keys, full = (x[slot, head] for x in cache.full.layer(layer))
    assert torch.equal(values, full[rows]) and torch.equal(cache.store.keys[layer, slot, head, :n], keys[rows])
    return rows.tolist()


moves = st.lists(
    st.tuples(st.sampled_from(["grow", "show", "cut", "forget", "follow"]), st.integers(1, 25), st.booleans()),
    min_size=1,
    max_size=12,
)


@given(st.sampled_from(VIEWS), st.integers(0, 12), st.booleans(), moves)
def test_what_is_there_after_any_moves(kind, fresh, transposed, steps):
    view = SparseView(kind, 16, 4, 3, 2)
    full = KVStore(SHAPE, 2, 400, transposed_keys=transposed)
    cache = SparseCache(
        full, lambda slots, rows: KVStore(SHAPE, slots, rows, transposed_keys=transposed), view, fresh, 5
    )
    queries = [torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    for seed, (move, count, flag) in enumerate([("grow", 3, False), *steps, ("follow", 1, False)]):
        length = full.lengths[1]
        if move == "grow":  # a verification: rows shown before are replaced by exact ones
            if full.unverified[1]:
                cache.forget(1, length)
            fill(full, 1, length, length + count, seed)
            full.commit(1, range(count))
        elif move == "show":
            fill(full, 1, full.readable(1), full.readable(1) + count, seed)
            full.unverified[1] += count
        elif move == "cut":
            full.truncate(1, max(1, length - count))
            cache.forget(1, full.lengths[1])
        elif move == "forget":
            start = max(0, length - count)
            fill(full, 1, start, length, seed)
            cache.forget(1, start)
        else:
            cache.follow(1, queries if flag else None, flag)
            n = full.readable(1)
            assert cache.store.lengths[1] <= cache.store.capacity - 5
            found = [positions(cache, 1, layer, head) for layer in range(2) for head in range(2)]
            for rows in found:
                assert rows == sorted(set(rows)) and rows[-1] == n - 1
                assert rows[: min(4, n)] == list(range(min(4, n))) and set(range(n - 3, n)) - {-1, -2} <= set(rows)
                assert len(rows) == cache.store.lengths[1]
            if cache.whole(1):
                assert found[0] == list(range(n))
            # Another slot has seen nothing of it.
            assert cache.store.lengths[0] == 0
            if n <= view.most + fresh and flag:
                assert cache.whole(1)


def test_rows_are_chosen_when_there_is_no_room_and_when_it_is_due():
    full = KVStore(SHAPE, 1, 200)
    cache = SparseCache(full, lambda slots, rows: KVStore(SHAPE, slots, rows), SparseView("tokens", 16, 4, 4, 1), 8, 3)
    queries = [torch.randn(4, 1, 4)] * 2

    def grow(count: int) -> None:
        fill(full, 0, full.lengths[0], full.lengths[0] + count, count)
        full.commit(0, range(count))

    grow(24)
    assert not cache.follow(0, queries, due=True) and cache.whole(0)  # all of it is there: nothing to choose
    grow(1)
    assert cache.follow(0, queries, due=False) and not cache.whole(0) and cache.store.lengths == [16]
    grow(8)
    assert not cache.follow(0, queries, due=False) and cache.store.lengths == [24]
    assert cache.follow(0, queries, due=True) and cache.store.lengths == [16]
    assert positions(cache, 0, 1, 1)[-4:] == [29, 30, 31, 32]


@pytest.mark.parametrize("kind", VIEWS)
def test_an_offloaded_text(tmp_path, kind):
    view = SparseView(kind, 16, 4, 4, 2)
    here, there = KVStore(SHAPE, 1, 100), DiskStore(tmp_path, SHAPE, 1, 100)
    queries = [torch.randn(4, 4, 4)] * 2
    found = []
    for full in (here, there):
        cache = SparseCache(full, lambda slots, rows: KVStore(SHAPE, slots, rows), view, 4, 3)
        for count in (50, 2, 3):
            fill(full, 0, full.lengths[0], full.lengths[0] + count, count)
            full.commit(0, range(count))
            cache.follow(0, queries, due=False)
        found.append([positions(cache, 0, layer, head) for layer in range(2) for head in range(2)])
    assert found[0] == found[1]
