"""Drafts on a GPU's attention, all sequences of a batch in one call, against one by one; stand-ins for the kernels."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from longdraft import Speculator
from longdraft.attention import hybrid
from longdraft.drafters.shared import block_drafter
from longdraft.views import draft_cache
from tests.support import torch_kernels
from tests.support.drafts import random_draft, random_eagle3, random_onepass
from tests.support.tiny import tiny_model


@pytest.fixture(autouse=True)
def on_torch_kernels(monkeypatch):
    monkeypatch.setenv("LONGDRAFT_NATIVE", "0")
    with torch_kernels.registered():
        yield


@pytest.mark.parametrize("kind", ["longspec", "eagle3", "onepass"])
def test_drafts_on_the_hybrid_path_propose_what_they_do_one_by_one(kind, monkeypatch, tmp_path):
    """Target, draft and cross-attention on it; a batch with prompts of several lengths."""
    model = tiny_model(layers=5, head_dim=8)
    make = {
        "longspec": random_draft, "eagle3": partial(random_eagle3, head_dim=8),
        "onepass": partial(random_onepass, head_dim=8),
    }[kind]  # fmt: skip
    draft = make(tmp_path / kind, model, window=12)
    prompts = [torch.randint(0, 61, (n,)).tolist() for n in (40, 3, 17)]
    for module in (draft_cache, block_drafter):
        monkeypatch.setattr(module, "SPARE_ENTRIES", 5)  # windows move after a few tokens

    def steps(method, **given):
        spec = Speculator(method, target=model, plan="fixed", **given)
        found = spec.stream(prompts, max_new_tokens=14, eos_token_ids=[])
        return [(step.token_ids, step.tree and step.tree.tokens) for step in found]

    alone = steps(kind, draft=draft)
    monkeypatch.setattr(hybrid, "why_unavailable", lambda *kind: None)
    monkeypatch.setenv("LONGDRAFT_ATTENTION", "hybrid")
    together = steps(kind, draft=draft)
    assert torch_kernels.counted["efficient"] > 0
    assert together == alone and max(len(tree) for _, tree in together if tree) > 3
