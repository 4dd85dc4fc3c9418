"""Settings of every test: offline, one thread, fixed seeds, a hypothesis profile that is the same everywhere."""

from __future__ import annotations

import gc
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
# One thread a process, read when torch is imported: several processes test side by side, and on tiny tensors a second
# thread costs ten times what it saves.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# Where a test takes several, they sleep while they wait for one another: others need the cores.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    # Read once, when triton is first imported, by whichever test that is.
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile(
    "longdraft",
    deadline=None,
    max_examples=40,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("longdraft")


def pytest_collection_finish() -> None:
    """What has been imported stays: the garbage collector need not look at a million objects again and again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """And at the end it goes."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def _kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _fixed_start(monkeypatch: pytest.MonkeyPatch, _kept: Path) -> None:
    """No test depends on the one before it, nor on what the shell has set."""
    torch.set_num_threads(1)  # tests of thread counts set their own
    torch.manual_seed(0)
    monkeypatch.setattr("longdraft.model.gguf_cache.cache_folder", lambda: _kept)  # of hundreds of tiny models
    monkeypatch.delenv("LONGDRAFT_ATTENTION", raising=False)
    # What is drafted must not depend on how busy the machine is; tests of the planner ask for it.
    monkeypatch.setenv("LONGDRAFT_PLAN", "fixed")
