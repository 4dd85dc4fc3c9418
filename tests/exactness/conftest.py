"""The workshop, and sizes at which tiny texts outgrow what large ones do."""

from __future__ import annotations

import pytest

from longdraft.drafters import self_drafter
from longdraft.views import compact
from tests.exactness.workshop import Workshop


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("drafts"))


@pytest.fixture(autouse=True)
def _small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_drafter, "FRESH", 6)
    monkeypatch.setattr(compact, "FRESH", 8)
    monkeypatch.setattr(compact, "PIECE", 16)
