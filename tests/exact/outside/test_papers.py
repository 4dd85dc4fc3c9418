"""Settings that the papers state, and texts that depend on nothing but the request."""

from __future__ import annotations

import json

import pytest

from longdraft import Speculator
from longdraft.drafts.speculators import to_speculators
from longdraft.registry import kind_of
from longdraft.training.config import RunConfig
from longdraft.training.dataset import split_dataset
from longdraft.training.documents import Document, SkipCounts
from tests.support.drafts import published_eagle, published_eagle3, random_heads
from tests.support.tiny import tiny_model
from tests.training.helpers import in_memory

SPECPV = {"budget": 8, "sink": 4, "recent": 4, "block": 4, "margin": 6, "drafter": "prompt-lookup", "min_n": 1}
PROMPTS = [[(7 * i * i + 3 * i) % 11 for i in range(n)] for n in (90, 61, 47)]


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
    run = spec.stream([PROMPTS[0]], max_new_tokens=80)
    trees = [step.tree for step in run if step.tree is not None]
    # The target's own token, then a head's three; a phrase of four tokens begins with the first of them.
    assert all(len(tree.children(0)) <= 1 for tree in trees)
    assert max(max(tree.depths) for tree in trees) == 4
    (result,) = run.results()
    assert 0 < result.accepted < result.drafted
    assert result.token_ids == Speculator("ar", target=model).generate([PROMPTS[0]], max_new_tokens=80)[0].token_ids


def test_specpv_writes_the_same_whatever_the_clock_and_its_neighbours(monkeypatch):
    model = tiny_model(vocab=11)
    monkeypatch.delenv("LONGDRAFT_PLAN", raising=False)
    spec = Speculator("specpv", target=model, **SPECPV)
    assert spec.planner() is None and "plan=fixed" in repr(spec)
    alone = [spec.generate([prompt], max_new_tokens=60)[0] for prompt in PROMPTS]
    assert all(0 < r.accepted < r.drafted and r.partial_rounds for r in alone)
    for batch in (1, 2, 3):
        together = spec.generate(PROMPTS, max_new_tokens=60, batch=batch)
        assert [r.token_ids for r in together] == [r.token_ids for r in alone]


def test_a_draft_that_does_not_say_where_its_residual_starts_is_read_as_vllm_reads_it(tmp_path):
    model = tiny_model(vocab=61, layers=8)
    published = published_eagle3(tmp_path / "published", model)
    kind = kind_of(published)
    to_speculators(kind.load(published), tmp_path / "speculators", "some/target")
    file = tmp_path / "speculators" / "config.json"
    config = json.loads(file.read_text())
    assert config.pop("norm_before_residual") is False
    texts = []
    for said in ({"norm_before_residual": True}, {"norm_before_residual": False}, {}):
        file.write_text(json.dumps(config | said))
        spec = Speculator(tmp_path / "speculators", target=model, plan="fixed", depth=3)
        texts.append([step.tree for step in spec.stream([[3, 9, 14]], max_new_tokens=12)])
    assert texts[2] == texts[0] != texts[1]
    assert not kind.load(published).shape.norm_before_residual


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
