"""A tiny model for tests of the bench."""

from __future__ import annotations

import pytest

from longdraft import LoadedModel
from tests.support.tiny import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def loaded():
    return LoadedModel(tiny_model(context=512, layers=2), tiny_tokenizer(chat=True))
