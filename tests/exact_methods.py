"""A speculator of each exact method for one tiny target, whose random drafts are right now and then."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from longdraft import Speculator
from tests.drafts import (
    published_eagle,
    random_draft,
    random_eagle3,
    random_heads,
    random_mtp,
    random_onepass,
    small_lm,
)
from tests.tiny import tiny_model

SMALL_VIEW: dict[str, Any] = {"view": "streaming", "budget": 12, "sink": 2, "window": 2}
EXACT = (
    "ar", "prompt-lookup", "suffix", "longspec", "eagle3", "eagle", "onepass", "small-lm", "specextend",
    "specextend-eagle3", "self", "magicdec", "triforce", "nested", "heads", "tokenswift", "mtp", "specpv-exact",
)  # fmt: skip


class Specs:
    """Speculators by method, each made once, with one target in float64: rounding decides no token."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float64) -> None:
        self._folder = folder
        self.model: PreTrainedModel = tiny_model(layers=4, hidden=32, heads=4, dtype=dtype)
        self.get = cache(self._make)

    def _make(self, method: str) -> Speculator:
        return Speculator(method, target=self.model, plan="fixed", **self.options(method))

    def options(self, method: str) -> dict[str, Any]:
        """Small trees, and a random draft, made anew."""
        folder = self._folder / method
        trained: dict[str, Any] = {
            "longspec": lambda: {"draft": random_draft(folder, self.model), "widths": (4, 2)},
            "eagle3": lambda: {"draft": self._eagle3(folder), "depth": 2, "top_k": 4},
            "eagle": lambda: {"draft": published_eagle(folder, self.model), "depth": 2, "top_k": 4},
            "onepass": lambda: {
                "draft": random_onepass(folder, self.model, layers=(0, 1, 2), head_dim=24),
                "depth": 3,
                "top_k": 3,
            },
            "specextend-eagle3": lambda: {"draft": self._eagle3(folder), "depth": 2, "nodes": 8},
            "small-lm": lambda: {
                "draft": self._target(folder),
                "depth": 3,
                "nodes": 8,
            },  # always right where nothing is processed
            "specextend": lambda: {"draft": small_lm(folder, vocab=61), "depth": 2, "nodes": 8},
            "triforce": lambda: {"draft": small_lm(folder, vocab=61)},
            "heads": lambda: {"draft": random_heads(folder, self.model), "nodes": 8},
            "mtp": lambda: {"draft": random_mtp(folder, self.model), "depth": 2, "top_k": 4},
            "tokenswift": lambda: {"draft": random_heads(folder, self.model), "reuse_n": 2, **SMALL_VIEW},
        }
        free: dict[str, dict[str, Any]] = {
            "prompt-lookup": {"min_n": 1},
            "suffix": {"earlier": 200},
            "self": {"depth": 2, **SMALL_VIEW},
            "nested": {"drafter": "prompt-lookup", "min_n": 1},
            "magicdec": {"drafter": "self", "depth": 2},
            "specpv-exact": {
                "drafter": "prompt-lookup", "min_n": 1, "budget": 8, "sink": 4, "recent": 4, "block": 4, "margin": 4,
            },
        }  # fmt: skip
        return trained[method]() if method in trained else free.get(method, {})

    def _target(self, folder: Path) -> Path:
        self.model.save_pretrained(folder)
        return folder

    def _eagle3(self, folder: Path) -> Path:
        return random_eagle3(folder, self.model, layers=(0, 1, 2), head_dim=24)


@pytest.fixture(scope="session")
def specs(tmp_path_factory: pytest.TempPathFactory) -> Specs:
    return Specs(tmp_path_factory.mktemp("drafts"))
