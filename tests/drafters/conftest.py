from __future__ import annotations

import pytest

from longdraft.drafters import eagle3, self_drafter
from longdraft.drafters.shared import whole_level
from longdraft.views import compact


@pytest.fixture
def float32_weights(monkeypatch):
    """Drafts are computed with the weights as they are, as their definitions in these tests are."""
    monkeypatch.setattr(whole_level, "light", lambda weights: weights)


@pytest.fixture
def small_sizes(monkeypatch):
    """Views are chosen and compacted in small pieces, so that short texts pass through several."""
    monkeypatch.setattr(self_drafter, "FRESH", 6)
    monkeypatch.setattr(compact, "FRESH", 8)
    monkeypatch.setattr(compact, "PIECE", 16)


@pytest.fixture
def small_chunks(monkeypatch):
    """EAGLE-3 and one-pass drafts read 7 rows of a text at a time."""
    monkeypatch.setattr(eagle3, "CHUNK", 7)
