"""The methods `specpv` and `specpv-exact` as users meet them."""

from __future__ import annotations

import pytest
import torch

from longdraft import PromptCache, Speculator
from longdraft.engine.partial import partial_view
from longdraft.planning.costs import CostTable
from longdraft.planning.planner import Plan
from tests.drafts import random_draft
from tests.planned import use_costs
from tests.tiny import tiny_model

SMALL = {"budget": 8, "sink": 4, "recent": 4, "block": 4, "margin": 6}
PROMPTS = [[(7 * i * i + 3 * i) % 11 for i in range(n)] for n in (90, 41, 8)]


@pytest.fixture
def model():
    return tiny_model(vocab=11, dtype=torch.float64)


def options(kind, folder, model):
    if kind == "longspec":
        return {"draft": random_draft(folder, model), "widths": (3, 4), **SMALL}
    return {"drafter": kind, **SMALL}


def test_specpv_says_that_it_is_approximate(model):
    result = Speculator("specpv", target=model, drafter="ar", **SMALL).generate([PROMPTS[0]], max_new_tokens=40)[0]
    assert not result.exact and len(result.token_ids) == 40 and result.rolled_back == 0


def test_two_runs_on_one_prompt_cache(model):
    """The rows that a run leaves behind are exact, whatever was drafted or guessed when it ended."""
    ar = Speculator("ar", target=model)
    for method in ("specpv", "specpv-exact"):
        cache = PromptCache()
        spec = Speculator(method, target=model, drafter="prompt-lookup", **SMALL)
        for n in (17, 30):
            text = spec.generate([PROMPTS[0]], max_new_tokens=n, cache=cache)[0].token_ids
        longer = PROMPTS[0] + text
        want = ar.generate([longer], max_new_tokens=20)[0].token_ids
        assert ar.generate([longer], max_new_tokens=20, cache=cache)[0].token_ids == want
        # And a shorter text in the same slot is not judged by the blocks of the longer one.
        want = ar.generate([longer[:60]], max_new_tokens=20)[0].token_ids
        got = Speculator("specpv-exact", target=model, drafter="ar", **SMALL)
        assert got.generate([longer[:60]], max_new_tokens=20, cache=cache)[0].token_ids == want


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"budget": 100}, "multiple of block"),
        ({"budget": 64}, "at least sink \\+ window"),
        ({"drafter": "prompt-lookup", "widths": (2, 2)}, "has no option widths"),
    ],
)
def test_options_that_cannot_be(model, given, word):
    with pytest.raises(ValueError, match=word):
        Speculator("specpv", target=model, **given)


def test_a_draft_of_another_kind_than_the_drafter(tmp_path, model):
    with pytest.raises(ValueError, match="longspec"):
        Speculator("specpv", target=model, draft=random_draft(tmp_path, model), drafter="eagle3")


def test_trees_are_planned_by_what_the_partial_cache_holds(model, monkeypatch):
    """Never by the text's length, once there is a partial cache."""
    use_costs(monkeypatch, CostTable((64,), (1, 64), ((1e-3, 1.1e-3),)))
    read: list[int] = []
    node_limit = Plan.node_limit

    def noted(self, sequences, lengths=None):
        read.extend(lengths)
        return node_limit(self, sequences, lengths)

    monkeypatch.setattr(Plan, "node_limit", noted)
    spec = Speculator("specpv", target=model, plan="auto", drafter="prompt-lookup", **SMALL)
    steps = list(spec.stream([PROMPTS[0]], max_new_tokens=40))
    most = partial_view(8, 4, 4, 4, 6).capacity
    assert read[0] == 91 and max(read[1:]) < 2 * most
    assert {step.mode for step in steps} == {"prefill", "refresh", "partial"}


# What rows of a full pass cost; forwards on the partial cache cost nothing on the clock of these tests.
FREE, DEAR = CostTable((0,), (1, 64), ((1e-3, 1.1e-3),)), CostTable((0,), (1, 2), ((1e-3, 1.0),))


@pytest.mark.parametrize(
    ("costs", "pays", "drafter"), [(FREE, True, "longspec"), (DEAR, False, "longspec"), (DEAR, False, "prompt-lookup")]
)
def test_the_exact_tier_turns_itself_off_where_it_does_not_pay(model, tmp_path, monkeypatch, costs, pays, drafter):
    use_costs(monkeypatch, costs)
    given = options(drafter, tmp_path, model)
    given.pop("widths", None)
    spec = Speculator("specpv-exact", target=model, plan="auto", **given)
    want = Speculator("ar", target=model).generate(PROMPTS[:2], max_new_tokens=60)
    for batch in (1, 2):
        run = spec.stream(PROMPTS[:2], max_new_tokens=60, batch=batch)
        modes = [step.mode for step in run if step.sequence == 0]
        assert [r.token_ids for r in run.results()] == [r.token_ids for r in want]
        assert modes[1:3] == ["full", "full"]  # what it is compared with is seen first
        cycles = modes.count("refresh")
        # Where it does not, it is tried once, and once more after a while.
        assert cycles > 4 if pays else cycles in (2, 4) and modes[-1] == "full"


def test_specpv_goes_back_to_full_rounds_where_parts_cost_more(model, monkeypatch):
    use_costs(monkeypatch, DEAR)
    spec = Speculator("specpv", target=model, plan="auto", drafter="prompt-lookup", **SMALL)
    modes = [step.mode for step in spec.stream([PROMPTS[0]], max_new_tokens=60)]
    assert modes.count("refresh") == 2 and modes[1] == "refresh" and modes[-1] == "full"
