"""Settings that the papers state, and texts that depend on nothing but the request."""

from __future__ import annotations

import pytest

from longdraft import Speculator
from longdraft.training.config import RunConfig
from longdraft.training.dataset import split_dataset
from longdraft.training.documents import Document, SkipCounts
from tests.support.drafts import published_eagle, published_eagle3, random_heads
from tests.support.tiny import tiny_model
from tests.training.helpers import in_memory

PROMPT = [(7 * i * i + 3 * i) % 11 for i in range(90)]


@pytest.mark.parametrize(("made", "method", "levels"), [(published_eagle3, "eagle3", 8), (published_eagle, "eagle", 6)])
def test_trees_are_as_deep_as_their_papers(made, method, levels, tmp_path):
    model = tiny_model(vocab=61, layers=8)
    draft = made(tmp_path / "draft", model)
    trees = []
    for options in ({}, {"depth": 3}, {"tree": "opt"}, {"top_k": 4}):
        spec = Speculator(method, target=model, draft=draft, plan="fixed", **options)
        steps = [step.tree for step in spec.stream([[3, 9, 14]], max_new_tokens=30) if step.tree is not None]
        assert steps
        trees.append(spec.recipe().drafter().tree.depth)
    assert trees == [levels, 3, 10, levels]


def test_tokenswifts_phrases_go_on_from_the_first_drafted_token(tmp_path):
    model = tiny_model(vocab=11, layers=2)
    spec = Speculator("tokenswift", target=model, draft=random_heads(tmp_path, model), heads=1, plan="fixed")
    run = spec.stream([PROMPT], max_new_tokens=80)
    trees = [step.tree for step in run if step.tree is not None]
    # The target's own token, then a head's three; a phrase of four tokens begins with the first of them.
    assert all(len(tree.children(0)) <= 1 for tree in trees)
    assert max(max(tree.depths) for tree in trees) == 4
    (result,) = run.results()
    assert 0 < result.accepted < result.drafted
    assert result.token_ids == Speculator("ar", target=model).generate([PROMPT], max_new_tokens=80)[0].token_ids


def test_pieces_of_a_text_are_all_learned_or_all_held_out():
    texts = [Document([1 + (i * j) % 97 for j in range(400)], 1) for i in range(1, 60)]
    sides = split_dataset(in_memory(texts), SkipCounts(), RunConfig(max_length=50, min_length=8, held_out=0.3), 1)

    def texts_of(side):
        return {next(i for i, text in enumerate(texts) if _within(piece.token_ids, text.token_ids)) for piece in side}

    assert sum(map(len, sides)) == 59 * 8
    learned, measured = map(texts_of, sides)
    assert learned and measured and not learned & measured


def _within(piece, text) -> bool:
    return any(text[at : at + len(piece)] == list(piece) for at in range(0, len(text), 50))
