"""Settings of every test: offline, one thread, fixed seeds, a hypothesis profile that is the same everywhere."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    # Read once, when triton is first imported, by whichever test that is.
    os.environ.setdefault("TRITON_INTERPRET", "1")

THREADS = torch.get_num_threads()

settings.register_profile(
    "longdraft",
    deadline=None,
    max_examples=40,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("longdraft")


@pytest.fixture(autouse=True)
def _fixed_start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on the one before it, nor on what the shell has set.

    One thread: on tiny tensors and busy cores a second one costs ten times what it saves.
    """
    real = request.node.get_closest_marker("model") or request.node.get_closest_marker("slow")
    torch.set_num_threads(THREADS if real else 1)
    torch.manual_seed(0)
    monkeypatch.delenv("LONGDRAFT_ATTENTION", raising=False)
    # What is drafted must not depend on how busy the machine is; tests of the planner ask for it.
    monkeypatch.setenv("LONGDRAFT_PLAN", "fixed")
