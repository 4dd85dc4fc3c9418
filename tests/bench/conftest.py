"""A tiny model for tests of the bench."""

from __future__ import annotations

import gc

import pytest

from longdraft import LoadedModel
from tests.support.tiny import tiny_model, tiny_tokenizer


@pytest.fixture(autouse=True)
def no_collections(monkeypatch):
    """Switches garbage collection before runs off: it takes longer than a tiny run."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


@pytest.fixture(scope="module")
def loaded():
    return LoadedModel(tiny_model(context=512, layers=2), tiny_tokenizer(chat=True))
