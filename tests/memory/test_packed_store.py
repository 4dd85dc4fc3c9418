"""A view in a store of rounded rows holds the text's rows, rounded."""

from __future__ import annotations

import pytest
import torch

from longdraft.memory.store import KVShape, KVStore
from longdraft.native.scaled import Scaled
from longdraft.views.cache import TrueCache
from longdraft.views.view import View

SHAPE = KVShape(layers=2, kv_heads=3, head_dim=16, dtype=torch.float32)


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return Scaled.of(x).to(x.dtype) if dtype == torch.int8 else x.to(dtype).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_a_view_holds_the_texts_rows_rounded(dtype, monkeypatch):
    monkeypatch.setenv("LONGDRAFT_NATIVE", "0")  # copies by our kernels have their chunks in another order
    full = KVStore(SHAPE, 1, 100, transposed_keys=True)
    view = View("tokens", 9, 4, 3, room=8)
    plain, packed = (
        TrueCache(full, lambda slots, rows, own=own: KVStore(SHAPE, slots, rows, dtype=own), view, 5)
        for own in (None, dtype)
    )
    queries = [torch.randn(6, 1, 16)] * 2
    for count in (40, 3, 2, 30):
        full.put_rows(0, full.lengths[0], *torch.randn(2, 2, 3, count, 16))
        full.commit(0, range(count))
        assert plain.update(0, queries) == packed.update(0, queries)
        n = plain.store.lengths[0]
        assert packed.store.lengths[0] == n and packed.store.keys.dtype == dtype
        for name in ("keys", "values"):
            x, y = (getattr(each.store, name)[:, 0, :, :n] for each in (packed, plain))
            assert torch.equal(x.to(torch.float32), rounded(y, dtype))
    # Unverified rows of the view reach drafters with the numbers that the view holds.
    rows = torch.randn(2, 2, 3, 2, 16)
    packed.store.put_rows(0, packed.store.lengths[0], *rows)
    packed.keep(0, [1])
    assert torch.equal(full.keys[:, 0, :, 75], rounded(rows[0][:, :, 1], dtype))
