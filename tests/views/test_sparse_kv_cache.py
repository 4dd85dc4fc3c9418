"""The sparse KV cache has exact copies after any selections, appends and truncations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longdraft.memory.offload import OffloadedKVStore
from longdraft.memory.store import KVShape, KVStore, StoreConfig
from longdraft.views.scorers import SCORERS
from longdraft.views.sparse_kv_cache import SparseKVCache
from longdraft.views.summaries import view_kernels
from longdraft.views.view import View
from tests.support.lazy_side import LazyCopyStream

SHAPE = KVShape(layers=2, kv_heads=2, head_dim=4, dtype=torch.float32)


def fill(store: KVStore, slot: int, start: int, end: int, seed: int) -> None:
    """A store whose values encode layer, head and position; keys are random."""
    d = store.shape.head_dim
    keys = torch.randn(2, 2, end - start, d, generator=torch.Generator().manual_seed(seed))
    values = torch.arange(start, end, dtype=torch.float32)[None, None, :, None].expand(2, 2, -1, d).clone()
    values += 1e5 * torch.arange(2)[:, None, None, None] + 1e4 * torch.arange(2)[None, :, None, None]
    store.write_entries(slot, start, keys, values)


def positions(cache: SparseKVCache, slot: int, layer: int, head: int) -> list[int]:
    """Returns the positions of a slot's entries; checks that keys and values equal those of the full store."""
    n = cache.store.lengths[slot]
    values = cache.store.values[layer, slot, head, :n]
    rows = (values[:, 0] - 1e5 * layer - 1e4 * head).long()
    keys, full = (x[slot, head] for x in cache.full_store.layer(layer))
    assert torch.equal(values, full[rows]) and torch.equal(cache.store.keys[layer, slot, head, :n], keys[rows])
    return rows.tolist()


moves = st.lists(
    st.tuples(st.sampled_from(["grow", "show", "cut", "forget", "follow"]), st.integers(1, 25), st.booleans()),
    min_size=1,
    max_size=12,
)


@given(
    st.sampled_from(list(SCORERS)), st.sampled_from([1, 2]), st.integers(0, 12), st.booleans(),
    st.sampled_from([4, 16]), moves,
)  # fmt: skip
def test_copies_are_right_after_any_operations(scorer, chunk, room, transposed, d, steps):
    """Head size 16 runs on our kernels if there are any, smaller ones on torch."""
    view, shape = View(scorer, 9, 4, 3, chunk, room), replace(SHAPE, head_dim=d)
    full = KVStore(shape, 2, 400, config=StoreConfig(transposed))
    cache = SparseKVCache(
        full,
        lambda slots, rows: KVStore(shape, slots, rows, config=StoreConfig(transposed)),
        view,
        5,
    )
    queries = [torch.randn(4, 3, d, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    taken_back, by_kernels = False, view_kernels(full, cache.store) is not None
    for seed, (move, count, flag) in enumerate([("grow", 3, False), *steps, ("follow", 1, False)]):
        length = full.lengths[1]
        if move == "grow":  # a verification: rows shown before are replaced by exact ones
            if full.num_unverified[1]:
                cache.invalidate(1, length)
            fill(full, 1, length, length + count, seed)
            full.commit(1, range(count))
        elif move == "show":
            fill(full, 1, full.readable_len(1), full.readable_len(1) + count, seed)
            full.num_unverified[1] += count
        elif move == "cut":
            full.truncate(1, max(1, length - count))
            cache.invalidate(1, full.lengths[1])
            taken_back = True
        elif move == "forget":
            start = max(0, length - count)
            fill(full, 1, start, length, seed)
            cache.invalidate(1, start)
            taken_back = True
        else:
            taken_back &= not cache.update(1, queries if flag else None, flag)
            n = full.readable_len(1)
            assert cache.store.lengths[1] <= cache.store.capacity - 5
            found = [positions(cache, 1, layer, head) for layer in range(2) for head in range(2)]
            for rows in found:
                # Our kernels leave chunks where they are.
                assert len(rows) == len(set(rows)) and (by_kernels or rows == sorted(rows))
                assert rows[-1] == n - 1
                assert rows[: min(4, n)] == list(range(min(4, n)))
                # The window does not slide back with a text that ends earlier.
                assert taken_back or set(range(max(0, n - 3), n)) <= set(rows)
                assert len(rows) == cache.store.lengths[1]
            if cache.has_full_context(1):
                assert found[0] == list(range(n))
            # Another slot has seen nothing of it.
            assert cache.store.lengths[0] == 0
            if n <= view.capacity and flag:
                assert cache.has_full_context(1)


@pytest.mark.parametrize("scorer", list(SCORERS))
def test_an_offloaded_store_selects_the_same(scorer):
    """As from a store in memory."""
    stores = KVStore(SHAPE, 1, 100), OffloadedKVStore(SHAPE, 1, 100, "cpu", copy_stream=LazyCopyStream())
    queries, found = [torch.randn(4, 4, 4)] * 2, []
    for full in stores:
        view = View(scorer, 8, 4, 4, 2, max_new=4)
        cache = SparseKVCache(full, lambda slots, rows: KVStore(SHAPE, slots, rows), view, 3)
        for count in (50, 2, 3):
            fill(full, 0, full.lengths[0], full.lengths[0] + count, count)
            full.commit(0, range(count))
            cache.update(0, queries)
        found.append([positions(cache, 0, layer, head) for layer in range(2) for head in range(2)])
    assert found[0] == found[1]


def test_buffered_entries_are_shown_to_drafters_and_dropped():
    full = KVStore(SHAPE, 1, 100)
    fill(full, 0, 0, 60, 0)
    full.commit(0, range(60))
    cache = SparseKVCache(
        full, lambda slots, rows: KVStore(SHAPE, slots, rows), View("minmax", 12, 4, 8, 4, max_new=8), 8
    )
    cache.reselect(0, [torch.randn(4, 3, 4)] * 2)
    held = cache.store.lengths[0]
    assert cache.in_use(0) and cache.num_buffered(0) == 0
    # A tree of four rows, of which the first and the third are accepted; then one row more.
    for rows, path, numbers in ((4, [0, 2], [11.0, 12.0, 13.0, 14.0]), (1, [0], [15.0])):
        start = cache.store.lengths[0]
        for own in (cache.store.keys, cache.store.values):
            own[:, 0, :, start : start + rows] = torch.tensor(numbers)[:, None]
        cache.buffer_path(0, path)
    assert (cache.num_buffered(0), cache.store.lengths[0]) == (3, held + 3)
    assert (full.lengths[0], full.num_unverified[0], full.readable_len(0)) == (60, 3, 63)
    assert full.values[0, 0, 0, 60:63, 0].tolist() == [11.0, 13.0, 15.0] == full.keys[1, 0, 1, 60:63, 2].tolist()
    cache.clear_buffer(0)
    assert (cache.num_buffered(0), cache.store.lengths[0]) == (0, held)
    cache.invalidate(0)
    assert not cache.in_use(0)
