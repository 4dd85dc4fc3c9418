"""Views by our kernels: what torch's operations choose, and copies that change only where they must."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longdraft.memory.store import KVShape, KVStore, StoreConfig
from longdraft.native.quantized_kv import INT4
from longdraft.native.views import SCORERS
from longdraft.views.sparse_kv_cache import SparseKVCache
from longdraft.views.summaries import view_kernels
from longdraft.views.view import View
from tests.native.cases import quantized
from tests.native.levels import needs_kernels

pytestmark = needs_kernels


def text(length: int, layers: int, d: int = 16, transposed: bool = True, seed: int = 0) -> KVStore:
    """Random keys, and values that say layer, head and position."""
    full = KVStore(KVShape(layers, 2, d, torch.float32), 1, 500, config=StoreConfig(transposed))
    full.keys.copy_(torch.randn(full.keys.shape, generator=torch.Generator().manual_seed(seed)))
    full.values.copy_(torch.arange(full.values.numel(), dtype=torch.float32).view(full.values.shape))
    full.lengths[0] = length
    return full


def cache_of(full: KVStore, view: View, dtype: torch.dtype = torch.float32) -> SparseKVCache:
    def new_store(slots: int, rows: int) -> KVStore:
        turned = dtype != torch.float32 or full.keys.stride(-1) != 1
        return KVStore(full.shape, slots, rows, config=StoreConfig(turned, dtype=dtype))

    return SparseKVCache(full, new_store, view, 2)


def positions(cache: SparseKVCache) -> torch.Tensor:
    """Positions of the copied entries, by layer and head, in their order; checks that they equal the source's."""
    full, size = cache.full_store, cache.store.lengths[0]
    values = cache.store.values[:, 0, :, :size]
    rows = ((values[..., 0] - full.values[:, 0, :, :1, 0]) / full.shape.head_dim).long()
    at = rows[..., None].expand(-1, -1, -1, full.shape.head_dim)
    for kept, whole in ((cache.store.keys, full.keys), (cache.store.values, full.values)):
        assert torch.equal(kept[:, 0, :, :size], whole[:, 0].gather(2, at))
    return rows


@given(
    st.sampled_from(SCORERS), st.sampled_from(["mean", "max", "last"]), st.sampled_from([1, 2, 8]), st.integers(1, 5),
    st.booleans(), st.sampled_from([16, 48, 64]), st.integers(0, 99),
)  # fmt: skip
def test_kernels_choose_the_chunks_that_torch_chooses(kind, reduction, chunk, looks, transposed, d, seed):
    view, found = View(kind, 6 * chunk, 2 * chunk, 7, chunk, 20, reduction), []
    queries = torch.randn(3, 6, looks, d, generator=torch.Generator().manual_seed(seed))
    for switch in ("1", "0"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LONGDRAFT_NATIVE", switch)
            full = text(301, 3, d, transposed, seed)
            assert (view_kernels(full) is not None) == (switch == "1")
            cache = cache_of(full, view)
            cache.reselect(0, queries)
        found.append(positions(cache).sort(-1).values.tolist())
    assert found[0] == found[1]


def test_chunks_that_are_chosen_again_stay_in_place():
    view, queries = View("mean-key", 64, 8, 12, 8, 40), torch.randn(2, 4, 1, 16)
    cache = cache_of(text(300, 2), view)
    cache.reselect(0, queries)
    before = positions(cache)
    cache.reselect(0, queries + 0.3 * torch.randn(2, 4, 1, 16))
    after = positions(cache)
    stayed = before == after
    assert stayed[..., 8:72].any() and not stayed[..., 8:72].all()
    # What is not in its place any more was not chosen again.
    for old, new, same in zip(before.flatten(0, 1), after.flatten(0, 1), stayed.flatten(0, 1), strict=True):
        assert not set(old[~same].tolist()) & set(new.tolist())


def test_chunks_with_nan_scores_rank_last():
    full = text(200, 1)
    full.keys[0, 0, :, 40:80] = torch.nan
    cache = cache_of(full, View("mean-key", 64, 8, 8, 8, 8))
    cache.reselect(0, torch.randn(1, 2, 1, 16))
    assert not set(range(40, 80)) & set(positions(cache).flatten().tolist())


@given(
    st.sampled_from([torch.bfloat16, torch.int8, INT4]), st.sampled_from(["mean-key", "streaming"]), st.integers(0, 99)
)
def test_quantized_copies_equal_torchs(dtype, kind, seed):
    view = View(kind, 64 if kind == "mean-key" else 0, 8, 12 if kind == "mean-key" else 400, 8, 40)
    queries, found = torch.randn(2, 4, 1, 16, generator=torch.Generator().manual_seed(seed)), []
    for switch in ("1", "0"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LONGDRAFT_NATIVE", switch)
            full = text(301, 2, seed=seed)
            full.values.copy_(torch.randn(full.values.shape, generator=torch.Generator().manual_seed(seed)))
            cache = cache_of(full, view, dtype)
            for full.lengths[0] in (301, 318):
                cache.update(0, queries)
        kept = [x[:, 0, :, : cache.store.lengths[0]].to(torch.float32) for x in (cache.store.keys, cache.store.values)]
        found.append(torch.cat(kept, -1))
    if kind == "streaming":  # all rows, in the text's order
        rows = [x[:, 0, :, :318] for x in (full.keys, full.values)]
        if dtype == torch.bfloat16:
            rounded = [x.to(dtype).float() for x in rows]
        else:
            rounded = [quantized(x, dtype, is_keys).to(x.dtype) for x, is_keys in zip(rows, (True, False), strict=True)]
        assert torch.equal(found[0], torch.cat([*rounded], -1))
    else:  # chunks stay in their places: another order of the same rows
        found = [x.flatten(0, 1).sort(1).values for x in found]
    assert torch.equal(*found)
