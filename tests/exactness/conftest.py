"""The workshop, and sizes at which tiny texts outgrow what large ones do."""

from __future__ import annotations

import pytest

from tests.exactness.workshop import Workshop


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("drafts"))


@pytest.fixture(autouse=True)
def _small_sizes(small_sizes: None) -> None:
    """In every test here."""
