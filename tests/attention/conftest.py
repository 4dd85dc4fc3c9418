"""The fixture of the contract suite."""

from __future__ import annotations

import pytest
import torch

from longdraft.attention import cpu
from tests import torch_kernels
from tests.attention.paths import PATHS


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Interpreted kernels meet trees; chains, of which trees are made, are slow tests."""
    for item in items:
        found = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if found.get("path") == "triton" and found.get("tree") is False and not torch.cuda.is_available():
            item.add_marker(pytest.mark.slow)


@pytest.fixture(params=[pytest.param(n, marks=[pytest.mark.gpu] * (p.device == "cuda")) for n, p in PATHS.items()])
def path(request, monkeypatch):
    """Each path, ready to run."""
    found = PATHS[request.param]
    if found.name == "triton":
        pytest.importorskip("triton")
    monkeypatch.setenv("LONGDRAFT_NATIVE", str(int(found.native)))
    monkeypatch.setattr(cpu, "FEW_ROWS", found.few_rows)
    monkeypatch.setattr(cpu, "LONG_PREFIX", found.long_prefix)
    with torch_kernels.registered():
        yield found
