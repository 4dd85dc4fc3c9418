"""The fixture of the contract suite."""

from __future__ import annotations

import pytest

from longdraft.attention import cpu
from tests import torch_kernels
from tests.attention.paths import PATHS, forget_package, install, three, two


@pytest.fixture(params=[pytest.param(n, marks=[pytest.mark.gpu] * (p.device == "cuda")) for n, p in PATHS.items()])
def path(request, monkeypatch):
    """Each path, ready to run."""
    found = PATHS[request.param]
    if found.name == "triton":
        pytest.importorskip("triton")
    monkeypatch.setenv("LONGDRAFT_NATIVE", str(int(found.native)))
    monkeypatch.setattr(cpu, "FEW_ROWS", found.few_rows)
    monkeypatch.setattr(cpu, "LONG_PREFIX", found.long_prefix)
    if found.flash_attn:
        install(monkeypatch, **{found.flash_attn: two if found.flash_attn == "flash_attn" else three})
    with torch_kernels.registered():
        yield found
    forget_package()
