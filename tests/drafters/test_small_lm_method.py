"""A small language model as a method: a good one is believed; which folders are one. Its output: tests/exact."""

from __future__ import annotations

import pytest
import torch

from longdraft import Speculator
from tests.drafts import small_lm
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("small_sizes")
PROMPTS = [[3, 9, 4, 7, 2, 5] * 8, [1, 2, 3], [(i * i) % 11 for i in range(130)], [8]]
STREAMING = {"view": "streaming", "sink": 4, "recent": 12, "widths": (3, 4, 4)}
RETRIEVAL = {"view": "retrieval", "sink": 4, "recent": 8, "chunk": 4, "chunks": 4, "every": 2, "threshold": 0.2}


@pytest.mark.parametrize("view", [{"widths": (1, 1, 1)}, STREAMING, RETRIEVAL], ids=str)
def test_a_good_draft_is_believed(tmp_path, view):
    """The target's own weights: in full view, all that is drafted is emitted."""
    model = tiny_model(vocab=11, dtype=torch.float64)
    model.save_pretrained(tmp_path)
    results = Speculator("small-lm", target=model, draft=tmp_path, **view).generate(PROMPTS, max_new_tokens=41)
    expected = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=41)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    lengths = [r.mean_accepted_length for r in results]
    assert "view" in view or lengths == [4.0] * 4
    assert max(lengths) > 3


def test_a_folder_of_transformers_is_a_method_with_its_draft(tmp_path):
    model, folder = tiny_model(vocab=11), small_lm(tmp_path / "draft")
    for spec in (
        Speculator(folder, target=model),
        Speculator(str(folder), target=model),
        Speculator("small-lm", target=model, draft=str(folder)),
        Speculator(target=model, draft=folder),
    ):
        assert spec.method.name == "small-lm"
    spec = Speculator("specextend", target=model, draft=folder, sink=4, recent=8, chunk=4)
    drafter = spec.recipe().drafter()
    assert (drafter.view, drafter.max_nodes, drafter.retrieval.view.chunks) == ("retrieval", 50, 32)
    expected = Speculator("ar", target=model).generate(PROMPTS, max_new_tokens=12)
    results = spec.generate(PROMPTS, max_new_tokens=12)
    assert [(r.token_ids, r.method) for r in results] == [(r.token_ids, "specextend") for r in expected]
