"""Drafts on a GPU's attention, all sequences of a batch in one call, against one by one; stand-ins for the kernels."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from longdraft import Speculator
from longdraft.attention import hybrid
from longdraft.drafters.shared.levels import Fed
from longdraft.memory.store import KVShape
from longdraft.views.window import Window
from tests import torch_kernels
from tests.drafts import random_draft, random_eagle3
from tests.tiny import tiny_model

HEADS, KV_HEADS, D, WINDOW = 4, 2, 8, 12


@pytest.fixture(autouse=True)
def on_torch_kernels(monkeypatch):
    monkeypatch.setenv("LONGDRAFT_NATIVE", "0")
    with torch_kernels.registered():
        yield


class Pair:
    """Two windows that get the same rows."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.windows = [Window(KVShape(1, KV_HEADS, D, dtype), 3, WINDOW, 16, "cpu") for _ in range(2)]
        self.windows[1].together = True
        self.dtype, self.tolerance = dtype, 2e-6 if dtype == torch.float32 else 3e-2

    def feed(self, fed: Fed) -> None:
        q = torch.randn(HEADS, len(fed.slots) * fed.width, D).to(self.dtype)
        k, v = (torch.randn(KV_HEADS, sum(fed.counts), D).to(self.dtype) for _ in range(2))
        plain, together = (fed.attend(window)(q, k, v) for window in self.windows)
        assert plain.shape == together.shape == q.shape and together.dtype == self.dtype
        torch.testing.assert_close(plain.float(), together.float(), atol=self.tolerance, rtol=self.tolerance)
        assert torch.equal(self.windows[0].keys, self.windows[1].keys)
        assert torch.equal(self.windows[0].values, self.windows[1].values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounds_of_a_batch_over_windows_that_move(dtype):
    pair, ends = Pair(dtype), {2: 0, 0: 0}
    for turn in range(60):
        counts = tuple(int(n) for n in torch.randint(1, WINDOW, (2,)))
        pair.feed(Fed((2, 0), counts, 1, starts=tuple(ends.values())))
        ends = {slot: end + n for (slot, end), n in zip(ends.items(), counts, strict=True)}
        if turn % 10:
            continue
        first = torch.eye(3, dtype=torch.bool).expand(2, -1, -1)
        pair.feed(Fed((2, 0), (3, 3), 3, depth=1, ancestors=first))
        second = torch.cat([torch.rand(2, 4, 3) < 0.5, torch.eye(4, dtype=torch.bool).expand(2, -1, -1)], dim=2)
        pair.feed(Fed((2, 0), (4, 4), 4, depth=2, ancestors=second))
    assert max(ends.values()) > WINDOW + 256  # they have moved


def test_rows_that_stand_for_tokens_not_known_yet():
    pair = Pair(torch.float32)
    pair.feed(Fed((1, 2), (5 + 2, 1 + 2), 3, starts=(0, 0), behind=2))
    pair.feed(Fed((1, 2), (2 + 2, 11 + 2), 3, starts=(5, 1), behind=2))


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
