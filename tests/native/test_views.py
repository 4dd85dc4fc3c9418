"""Views by our kernels: what torch's operations choose, and copies that change only where they must."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longdraft.memory.packed_store import PackedStore
from longdraft.memory.store import KVShape, KVStore
from longdraft.native import kernels
from longdraft.native.views import KINDS
from longdraft.views import cache as caches
from longdraft.views import summaries
from longdraft.views.cache import TrueCache
from longdraft.views.kernels import view_kernels
from longdraft.views.view import View

pytestmark = pytest.mark.skipif(kernels() is None, reason="no kernels here")


def grown(full: KVStore, length: int, seed: int) -> None:
    """Random keys, and values that say layer, head and position."""
    torch.manual_seed(seed)
    full.keys.normal_()
    full.values.copy_(torch.arange(full.values.numel(), dtype=torch.float32).view(full.values.shape))
    full.lengths[0] = length


def seen(cache: TrueCache) -> list[list[float]]:
    """The first number of each value row, by layer and head, sorted."""
    values = cache.store.values[:, 0, :, : cache.store.lengths[0], 0]
    return values.flatten(0, 1).sort(-1).values.tolist()


@given(
    st.sampled_from(KINDS), st.sampled_from(["mean", "max", "last"]), st.sampled_from([1, 2, 8]), st.integers(1, 5),
    st.booleans(), st.sampled_from([16, 48, 64]), st.integers(0, 99),
)  # fmt: skip
def test_what_is_chosen_is_what_torch_chooses(kind, reduction, chunk, looks, transposed, d, seed):
    shape = KVShape(layers=3, kv_heads=2, head_dim=d, dtype=torch.float32)
    full = KVStore(shape, 1, 400, transposed_keys=transposed)
    grown(full, 301, seed)
    view = View(kind, 6 * chunk, 2 * chunk, 7, chunk, 20, reduction)
    queries = torch.randn(3, 6, looks, d)
    found = []
    for served in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not served:
                for module in (caches, summaries):
                    patch.setattr(module, "view_kernels", lambda *stores: None)
            cache = TrueCache(
                full, lambda slots, rows: KVStore(shape, slots, rows, transposed_keys=transposed), view, 2
            )
        assert (cache._copies is not None) == served
        cache.choose(0, queries)
        found.append(seen(cache))
    assert found[0] == found[1]


def chosen(cache):
    """Chunks in slot 0, in the order of their rows: (layers, KV heads, chunks)."""
    return cache._held[0]


def test_chunks_that_are_chosen_again_stay_where_they_are():
    shape = KVShape(layers=2, kv_heads=2, head_dim=16, dtype=torch.float32)
    full = KVStore(shape, 1, 400, transposed_keys=True)
    grown(full, 300, 0)
    view = View("mean-key", 64, 8, 12, 8, 40)
    cache = TrueCache(full, lambda slots, rows: KVStore(shape, slots, rows, transposed_keys=True), view, 2)
    queries = torch.randn(2, 4, 1, 16)
    cache.choose(0, queries)
    before = chosen(cache).clone()
    cache.choose(0, queries + 0.3 * torch.randn(2, 4, 1, 16))
    after = chosen(cache)
    stayed = before == after
    assert stayed.any() and not stayed.all()
    # What is not in its place any more was not chosen again.
    for old, new, same in zip(before.flatten(0, 1), after.flatten(0, 1), stayed.flatten(0, 1), strict=True):
        assert not set(old[~same].tolist()) & set(new.tolist())
    size = cache.store.lengths[0]
    first = full.values[:, 0, :, :1, 0]
    rows = ((cache.store.values[:, 0, :, :size, 0] - first) / 16).long()
    keys = full.keys[:, 0].gather(2, rows[..., None].expand(-1, -1, -1, 16))
    assert torch.equal(cache.store.keys[:, 0, :, :size], keys)


def test_heads_of_another_size_are_left_to_torch():
    assert view_kernels(KVStore(KVShape(1, 1, 16, torch.float32), 1, 8)) is not None
    assert view_kernels(KVStore(KVShape(1, 1, 20, torch.float32), 1, 8)) is None
    assert view_kernels(KVStore(KVShape(1, 1, 16, torch.bfloat16), 1, 8)) is None


def test_chunks_without_a_number_are_wanted_least():
    shape = KVShape(layers=1, kv_heads=1, head_dim=16, dtype=torch.float32)
    full = KVStore(shape, 1, 200)
    grown(full, 200, 1)
    full.keys[0, 0, 0, 40:80] = torch.nan
    cache = TrueCache(full, lambda slots, rows: KVStore(shape, slots, rows), View("mean-key", 64, 8, 8, 8, 8), 2)
    cache.choose(0, torch.randn(1, 1, 1, 16))
    assert not set(range(5, 10)) & set(chosen(cache).flatten().tolist())


@given(st.sampled_from([torch.bfloat16, torch.int8]), st.sampled_from(["mean-key", "streaming"]), st.integers(0, 99))
def test_rounded_copies_are_what_torch_makes_of_the_rows(dtype, kind, seed):
    shape = KVShape(layers=2, kv_heads=2, head_dim=16, dtype=torch.float32)
    full = KVStore(shape, 1, 500, transposed_keys=True)
    grown(full, 301, seed)
    full.values.normal_()
    view = View(kind, 64 if kind == "mean-key" else 0, 8, 12 if kind == "mean-key" else 400, 8, 40)
    queries = torch.randn(2, 4, 1, 16)
    found = []
    for served in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not served:
                patch.setattr(caches, "view_kernels", lambda *stores: None)
            cache = TrueCache(full, lambda slots, rows: PackedStore(shape, slots, rows, dtype), view, 2)
        full.lengths[0] = 301
        cache.update(0, queries)
        full.lengths[0] = 318
        cache.update(0, queries)
        kept = [x[:, 0, :, : cache.store.lengths[0]].to(torch.float32) for x in (cache.store.keys, cache.store.values)]
        found.append(torch.cat(kept, -1))
    if kind == "mean-key":  # chunks stay in their places: another order of the same rows
        found = [x.flatten(0, 1).sort(1).values for x in found]
    assert torch.equal(*found)
