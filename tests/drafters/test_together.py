"""Drafts on a GPU's attention, all sequences of a batch in one call, against one by one; stand-ins for the kernels."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from longdraft import Speculator
from longdraft.attention import hybrid
from longdraft.drafters.shared import rows
from longdraft.drafters.shared.rows import Rows
from longdraft.memory.store import KVShape, KVStore
from longdraft.views.draft_cache import SPARE, DraftCache
from tests.support import torch_kernels
from tests.support.drafts import random_draft, random_eagle3
from tests.support.tiny import tiny_model

HEADS, KV_HEADS, D, WINDOW = 4, 2, 8, 12


@pytest.fixture(autouse=True)
def on_torch_kernels(monkeypatch):
    monkeypatch.setenv("LONGDRAFT_NATIVE", "0")
    with torch_kernels.registered():
        yield


class Pair:
    """Two caches that get the same rows, one sequence after the other and all at once."""

    def __init__(self, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        shape = KVShape(1, KV_HEADS, D, dtype, padded=True)
        stores = [KVStore(shape, 3, WINDOW + SPARE + 16 + 1) for _ in range(2)]
        self.caches = [DraftCache(store, 16, WINDOW) for store in stores]
        monkeypatch.setattr(rows, "together", lambda cache: cache is self.caches[1])
        self.dtype, self.tolerance = dtype, 2e-6 if dtype == torch.float32 else 3e-2

    def read(self, slots: tuple[int, ...], width: int, behind: int = 0) -> None:
        for cache in self.caches:
            for slot in slots:
                cache.ready(slot, width)
                cache.extend(slot, width)
        self.feed(*(Rows.new(cache, slots, width, behind) for cache in self.caches))

    def nodes(self, slots: tuple[int, ...], depth: int, ancestors: torch.Tensor) -> None:
        self.feed(*(Rows.nodes(cache, slots, depth, ancestors) for cache in self.caches))

    def feed(self, *fed: Rows) -> None:
        count, q = len(fed[0].slots), torch.randn(HEADS, len(fed[0].slots) * fed[0].going, D).to(self.dtype)
        k, v = (torch.randn(KV_HEADS, count * fed[0].width, D).to(self.dtype) for _ in range(2))
        both = zip(self.caches, fed, strict=True)
        plain, together = (own.attends(cache)[0](q, k, v) for cache, own in both)
        assert plain.shape == together.shape == q.shape and together.dtype == self.dtype
        torch.testing.assert_close(plain.float(), together.float(), atol=self.tolerance, rtol=self.tolerance)
        assert torch.equal(self.caches[0].store.keys, self.caches[1].store.keys)
        assert torch.equal(self.caches[0].store.values, self.caches[1].store.values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounds_of_a_batch_over_windows_that_move(dtype, monkeypatch):
    pair = Pair(dtype, monkeypatch)
    for turn in range(60):
        pair.read((2, 0), int(torch.randint(1, WINDOW, ())))
        if turn % 10:
            continue
        first = torch.eye(3, dtype=torch.bool).expand(2, -1, -1)
        pair.nodes((2, 0), 1, first)
        second = torch.cat([torch.rand(2, 4, 3) < 0.5, torch.eye(4, dtype=torch.bool).expand(2, -1, -1)], dim=2)
        pair.nodes((2, 0), 2, second)
    assert pair.caches[0].end(2) > pair.caches[0].store.lengths[2]  # they have moved


def test_rows_that_stand_for_tokens_not_known_yet(monkeypatch):
    pair = Pair(torch.float32, monkeypatch)
    pair.read((1, 2), 5, behind=2)
    pair.read((1, 2), 11, behind=2)


@pytest.mark.parametrize("kind", ["longspec", "eagle3"])
def test_methods_decode_on_the_hybrid_path_as_the_target_alone(kind, monkeypatch, tmp_path):
    """Target, draft and cross-attention on it; a batch with prompts of several lengths."""
    model = tiny_model(layers=5, head_dim=8)
    make = {"longspec": random_draft, "eagle3": partial(random_eagle3, head_dim=8)}[kind]
    draft = make(tmp_path / kind, model, window=12)
    prompts = [torch.randint(0, 61, (n,)).tolist() for n in (40, 3, 17)]
    expected = Speculator("ar", target=model).generate(prompts, max_new_tokens=12)
    monkeypatch.setattr(hybrid, "unavailable", lambda *kind: None)
    monkeypatch.setenv("LONGDRAFT_ATTENTION", "hybrid")
    found = Speculator(kind, target=model, draft=draft).generate(prompts, max_new_tokens=12)
    assert torch_kernels.counted["efficient"] > 0
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]
