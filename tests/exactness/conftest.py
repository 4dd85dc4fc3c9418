"""The workshop, and sizes at which tiny texts outgrow what large ones do."""

from __future__ import annotations

import pytest

from longdraft.drafters import self_drafter, small_lm_cache
from tests.exactness.workshop import Workshop


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("drafts"))


@pytest.fixture(autouse=True)
def _small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_drafter, "FRESH", 6)
    monkeypatch.setattr(small_lm_cache, "FRESH", 8)
    monkeypatch.setattr(small_lm_cache, "PIECE", 16)
