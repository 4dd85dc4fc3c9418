"""The methods `specpv` and `specpv-exact` as users meet them: what is approximate, what is kept, and when they pay."""

from __future__ import annotations

import time

import pytest
import torch

from longdraft import PromptCache, Speculator, compose
from longdraft.engine.partial import ExactSpecPV, SpecPV, partial_view
from longdraft.methods import METHODS
from tests.drafts import random_draft
from tests.tiny import tiny_model

SMALL = {"budget": 8, "sink": 4, "recent": 4, "block": 4, "margin": 6}
PROMPTS = [[(7 * i * i + 3 * i) % 11 for i in range(n)] for n in (90, 41, 8)]


@pytest.fixture
def model():
    return tiny_model(vocab=11, dtype=torch.float64)


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
            (result,) = spec.generate([PROMPTS[0]], max_new_tokens=n, cache=cache)
        assert result.partial_rounds > 0 and result.drafted > result.accepted
        longer = PROMPTS[0] + result.token_ids
        want = ar.generate([longer], max_new_tokens=20)[0].token_ids
        assert ar.generate([longer], max_new_tokens=20, cache=cache)[0].token_ids == want
        # And a shorter text in the same slot is not judged by the blocks of the longer one.
        want = ar.generate([longer[:60]], max_new_tokens=20)[0].token_ids
        got = Speculator("specpv-exact", target=model, drafter="ar", **SMALL)
        assert got.generate([longer[:60]], max_new_tokens=20, cache=cache)[0].token_ids == want


# --- where it does not pay; on a clock by which full passes take what is said, and all else no time ---

FREE, DEAR = {1: 1e-3, 64: 1.1e-3}, {1: 1e-3, 2: 1.0}


@pytest.fixture
def timed(model, tmp_path, monkeypatch):
    """``timed(kind, costs, drafter)``: a composed method whose full passes take that long."""
    now, before = [0.0], dict(METHODS)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def made(kind, costs, drafter):
        class Timed(kind):
            def forward(self, trees, *rest, **options):
                (one, first), (many, last) = costs.items()
                rows = max(tree.size for tree in trees) * len(trees)
                now[0] += first + (last - first) * (rows - one) / (many - one)
                return super().forward(trees, *rest, **options)

        given = {"draft": random_draft(tmp_path / "draft", model)} if drafter == "longspec" else {}
        own = Speculator(drafter, target=model, plan=costs, **given)
        method = compose("timed", own.recipe().drafter, lambda: Timed(partial_view(8, 4, 4, 4, 6)))
        return Speculator(method, target=model, plan=costs)

    yield made
    METHODS.clear()
    METHODS.update(before)


@pytest.mark.parametrize(
    ("costs", "pays", "drafter"), [(FREE, True, "longspec"), (DEAR, False, "longspec"), (DEAR, False, "prompt-lookup")]
)
def test_the_exact_tier_turns_itself_off_where_it_does_not_pay(model, timed, costs, pays, drafter):
    spec = timed(ExactSpecPV, costs, drafter)
    want = Speculator("ar", target=model).generate(PROMPTS[:2], max_new_tokens=60)
    for batch in (1, 2):
        run = spec.stream(PROMPTS[:2], max_new_tokens=60, batch=batch)
        modes = [step.mode for step in run if step.sequence == 0]
        assert [r.token_ids for r in run.results()] == [r.token_ids for r in want]
        assert modes[1:3] == ["full", "full"]  # what it is compared with is seen first
        cycles = modes.count("refresh")
        # Where it does not, it is tried once, and once more after a while.
        assert cycles > 4 if pays else cycles in (2, 4) and modes[-1] == "full"


def test_specpv_goes_back_to_full_rounds_where_parts_cost_more(timed):
    spec = timed(SpecPV, DEAR, "prompt-lookup")
    modes = [step.mode for step in spec.stream([PROMPTS[0]], max_new_tokens=60)]
    assert modes.count("refresh") == 2 and modes[1] == "refresh" and modes[-1] == "full"
