"""A tiny chat model in a folder, some text, settings, and a clean accelerate for every test."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState

from longdraft.training.config import RunConfig
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.training.helpers import WORDS, settings


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder."""
    folder = tmp_path_factory.mktemp("target")
    tiny_model(context=512).save_pretrained(folder)
    tiny_tokenizer(chat=True).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model, of another size."""
    folder = tmp_path_factory.mktemp("wide")
    tiny_model(hidden=96).save_pretrained(folder)
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
def config(target: Path, text: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    """Settings of a run of a dozen steps of a kind, in the folder ``run``."""

    def make(kind: str = "longspec", **over: object) -> RunConfig:
        return settings(kind, **({"target": target, "data": text, "out": tmp_path / "run"} | over))

    return make
