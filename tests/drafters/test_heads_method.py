"""Chained heads and TokenSwift as methods. That the output is the target's: tests/exactness."""

from __future__ import annotations

import pytest
import torch

from longdraft import Sampling, Speculator
from tests.drafts import random_draft, random_heads
from tests.tiny import tiny_model

PROMPTS = [[3, 9, 4, 7, 2, 5] * 8, [1, 2, 3], [(i * i) % 11 for i in range(130)], [8]]
PENALISED = Sampling(1.5, repetition_penalty=1.3, repetition_window=3)


def test_specpv_takes_them_for_a_drafter(tmp_path):
    model = tiny_model(vocab=11, dtype=torch.float64)
    sizes = {"budget": 8, "sink": 4, "recent": 4, "block": 4, "margin": 6}
    spec = Speculator("specpv", target=model, draft=random_heads(tmp_path, model), **sizes)
    results = spec.generate(PROMPTS, max_new_tokens=30)
    assert all(len(r.token_ids) == 30 for r in results) and sum(r.accepted for r in results) > 0


def test_a_good_draft_is_always_believed(tmp_path):
    """The target's own weights say the target's own distribution: coming samples are foreseen, but where a penalty
    reads the text."""
    model = tiny_model(vocab=11, dtype=torch.float64)
    model.save_pretrained(tmp_path)
    spec = Speculator("small-lm", target=model, draft=tmp_path, tree="chain", depth=3)
    for sampling in (Sampling(1.0), PENALISED, Sampling(0.7, top_p=0.9)):
        results = spec.generate(PROMPTS, max_new_tokens=41, sampling=sampling, seed=1)
        assert ([r.mean_accepted_length for r in results] == [4.0] * 4) == (sampling is not PENALISED)


def test_drafts_of_other_kinds(tmp_path):
    model = tiny_model(vocab=11)
    for method in ("heads", "tokenswift"):
        with pytest.raises(OSError, match="holds a draft for longspec"):
            Speculator(method, target=model, draft=random_draft(tmp_path / method, model))
        with pytest.raises(RuntimeError, match=f"Method {method} needs a draft"):
            Speculator(method, target=model)
    with pytest.raises(OSError, match="holds a draft for heads, not for longspec"):
        Speculator("longspec", target=model, draft=random_heads(tmp_path / "own", model))
