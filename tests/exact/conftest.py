"""The workshop and the table on a larger vocabulary, made once a test process."""

from __future__ import annotations

import pytest

from tests.support.methods import Specs, Workshop


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("drafts"))


@pytest.fixture(scope="session")
def specs(tmp_path_factory: pytest.TempPathFactory) -> Specs:
    return Specs(tmp_path_factory.mktemp("drafts"))
