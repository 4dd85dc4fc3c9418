"""Overlap of a draft's distribution with the target's."""

from __future__ import annotations

import torch

from benchmarks.distribution_shift import decode
from longdraft.bench.data import Sample
from longdraft.bench.prompts import Prompt
from longdraft.drafts.language_model import SmallLMDraft
from longdraft.model.runner import TargetRunner
from longdraft.recipes import recipe_for, resolve
from tests.drafts import small_lm
from tests.tiny import tiny_model

PROMPT = Prompt(Sample("", "", "", ""), tuple(i % 11 for i in range(40)))


def test_the_target_overlaps_with_itself_and_another_model_less(tmp_path):
    target = tiny_model(vocab=11, dtype=torch.float32)
    target.save_pretrained(tmp_path / "same")
    runner, found = TargetRunner(target), {}
    for name, draft in {"same": SmallLMDraft.load(tmp_path / "same"), "other": small_lm(tmp_path, 11)}.items():
        recipe = recipe_for(*resolve("small-lm", {"draft": draft, "tree": "chain", "depth": 1}), runner)
        found[name] = decode(runner, recipe, PROMPT, 40)
    assert min(found["same"]["overlap"]) > 0.999 and min(found["same"]["accepted"]) == 1.0
    for o, coupled, apart in zip(*(found["other"][name] for name in ("overlap", "coupled", "apart")), strict=True):
        assert apart <= o + 1e-6 and coupled <= o < 0.999
