"""A tiny chat model in a folder, some text, and a clean accelerate for every test."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState

from longdraft.training.config import TrainConfig
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training.helpers import WORDS


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder."""
    folder = tmp_path_factory.mktemp("target")
    tiny_model(context=512).save_pretrained(folder)
    tiny_tokenizer(chat=True).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JSONL: 40 rows of a few hundred characters, which are as many tokens."""
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    rows = [{"text": " ".join(rng.choices(WORDS, k=rng.randint(20, 50)))} for _ in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(autouse=True)
def _clean_accelerate() -> None:
    """accelerate keeps its first settings for the life of a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def config(target: Path, text: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """Settings of a run of a dozen steps in float32 on the CPU."""

    def make(**over: object) -> TrainConfig:
        settings: dict[str, object] = {
            "data": (str(text),), "target": str(target), "out": str(tmp_path / "run"), "max_length": 64,
            "min_length": 16, "rows": 256, "epochs": 1.0, "lr": 3e-3,
            "precision": "no", "held_out": 0.1, "save_every": 3,
            "measure_every": 5, "window": 12, "intermediate_size": 64, "device": "cpu", "threads": 1,
        }  # fmt: skip
        return TrainConfig(**(settings | over))  # type: ignore[arg-type]

    return make
