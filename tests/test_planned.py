"""Planned rounds, end to end: trees of any size, or none, and the target's output all the same."""

from __future__ import annotations

import pytest
import torch

from longdraft import Sampling, Speculator
from longdraft.drafters import small_lm_cache
from longdraft.planning import choice
from longdraft.planning.costs import CostTable
from tests.drafts import random_draft, random_eagle3, small_lm
from tests.tiny import tiny_model

PROMPTS = [[3, 9, 4, 7, 2, 5] * 8, [1, 2, 3], [(i * i) % 11 for i in range(130)], [8]]
FREE = CostTable((0,), (1, 64), ((1e-2, 1.01e-2),))  # rows cost nothing
SOME = CostTable((0,), (1, 64), ((1e-4, 2e-3),))
DEAR = CostTable((0,), (1, 2), ((1e-9, 1.0),))  # a second row costs an age
METHODS = ["prompt-lookup", "longspec", "eagle3", "small-lm", "specextend"]
methods = pytest.mark.parametrize("method", METHODS)
tables = pytest.mark.parametrize("table", [FREE, SOME, DEAR], ids=["free", "some", "dear"])


@pytest.fixture(autouse=True)
def _small_sizes(monkeypatch):
    monkeypatch.setattr(small_lm_cache, "FRESH", 8)
    monkeypatch.setattr(small_lm_cache, "PIECE", 16)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A planned method on a tiny model, and plain decoding of it."""

    def make(method, table=FREE, plan="auto", **options):
        monkeypatch.setattr(choice, "table_for", lambda runner, progress=None, seconds=None: table)
        model = tiny_model(vocab=11, layers=6, dtype=torch.float64)
        if method == "longspec":
            options["draft"] = random_draft(tmp_path, model, window=16)
        elif method == "eagle3":
            options["draft"] = random_eagle3(tmp_path, model)
        elif method != "prompt-lookup":
            options["draft"] = small_lm(tmp_path, 11)
        if method == "specextend":
            options |= {"sink": 4, "recent": 8, "chunk": 4, "chunks": 4}
        return Speculator(method, target=model, plan=plan, **options), Speculator("ar", target=model)

    return make


@methods
@tables
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, top_k=8)], ids=["greedy", "drawn"])
def test_the_output_is_plain_decodings(made, method, table, sampling):
    spec, ar = made(method, table)
    together = spec.generate(PROMPTS, max_new_tokens=40, sampling=sampling, seed=5)
    for i, prompt in enumerate(PROMPTS):
        alone = spec.generate([prompt], max_new_tokens=40, sampling=sampling, seed=5 + i)[0]
        plain = ar.generate([prompt], max_new_tokens=40, sampling=sampling, seed=5 + i)[0]
        assert together[i].token_ids == alone.token_ids == plain.token_ids


@methods
def test_rows_that_cost_nothing_are_used(made, method):
    spec, _ = made(method)
    assert sum(r.drafted for r in spec.generate(PROMPTS, max_new_tokens=40)) > 20


@methods
def test_rows_that_do_not_pay_are_not_verified(made, method):
    spec, _ = made(method, DEAR)
    for result in spec.generate(PROMPTS, max_new_tokens=40):
        assert result.drafted == 0 and result.rounds == 39


def test_a_tree_that_was_asked_for_is_grown(made):
    spec, _ = made("longspec", plan=None, widths=(2, 2))
    assert spec.planner() is None
    result = spec.generate([PROMPTS[0]], max_new_tokens=30)[0]
    assert result.drafted >= 4 * (result.rounds - 2)


def test_a_tree_that_was_asked_for_can_be_cut(made):
    spec, ar = made("longspec", table=DEAR, widths=(2, 2))
    result = spec.generate([PROMPTS[0]], max_new_tokens=30)[0]
    assert result.drafted == 0
    assert result.token_ids == ar.generate([PROMPTS[0]], max_new_tokens=30)[0].token_ids


def test_the_environment_chooses_where_nobody_asks(made, monkeypatch):
    monkeypatch.setenv("LONGDRAFT_PLAN", "auto")
    assert made("longspec", plan=None)[0].planner() is not None
    assert made("longspec", plan="fixed")[0].planner() is None
    monkeypatch.setenv("LONGDRAFT_PLAN", "fixed")
    assert made("longspec", plan=None)[0].planner() is None
    assert made("longspec", plan="auto")[0].planner() is not None
    monkeypatch.setenv("LONGDRAFT_PLAN", "best")
    with pytest.raises(ValueError, match="auto or fixed"):
        made("longspec", plan=None)[0].planner()


def test_a_plan_that_there_is_not():
    with pytest.raises(ValueError, match="auto or fixed"):
        Speculator("ar", plan="best")


def test_what_is_never_planned(made, tmp_path):
    """Plain decoding, partial verification, KV that lies elsewhere: what these cost is not known."""
    model = made("prompt-lookup")[0].runner().model
    for method, options in (("ar", {}), ("specpv", {"drafter": "prompt-lookup"})):
        assert Speculator(method, target=model, plan="auto", **options).planner() is None
    assert Speculator("prompt-lookup", target=model, plan="auto", offload=tmp_path).planner() is None


def test_without_a_table_trees_are_fixed(made):
    spec, ar = made("prompt-lookup", table=None)
    assert spec.planner() is None
    assert spec.generate([PROMPTS[0]])[0].token_ids == ar.generate([PROMPTS[0]])[0].token_ids


@pytest.mark.parametrize("settings", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8}], ids=str)
def test_custom_generate(made, settings):
    spec, ar = made("prompt-lookup", SOME)
    model = spec.runner().model
    ids = torch.tensor([PROMPTS[0]])
    outputs = []
    for each in (spec, ar):
        torch.manual_seed(3)
        outputs.append(model.generate(ids, custom_generate=each, max_new_tokens=30, **settings).tolist())
    assert outputs[0] == outputs[1]


def test_two_runs_at_once(made):
    spec, ar = made("longspec", SOME)
    one, two = (spec.stream([p], max_new_tokens=30) for p in PROMPTS[1:3])
    for _ in range(4):
        next(iter(one), None), next(iter(two), None)
    expected = [ar.generate([p], max_new_tokens=30)[0].token_ids for p in PROMPTS[1:3]]
    assert [r.results()[0].token_ids for r in (one, two)] == expected
