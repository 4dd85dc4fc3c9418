"""Settings of every test: offline, two threads, fixed seeds, a hypothesis profile that is the same everywhere."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(2)
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


@pytest.fixture(autouse=True)
def _fixed_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on the one before it, nor on what the shell has set."""
    torch.manual_seed(0)
    monkeypatch.delenv("LONGDRAFT_ATTENTION", raising=False)
