from __future__ import annotations

import pytest

from longdraft.drafters import eagle3
from longdraft.drafters.shared import block_drafter, fused_level


@pytest.fixture
def float32_weights(monkeypatch):
    """Drafts are computed with the weights as they are, as their definitions in these tests are."""
    monkeypatch.setattr(fused_level, "quantize_for_draft", lambda weights: weights)


@pytest.fixture
def small_chunks(monkeypatch):
    """EAGLE-3 drafts read 7 rows of a text at a time."""
    for module in (eagle3, block_drafter):
        monkeypatch.setattr(module, "KV_CHUNK", 7)
