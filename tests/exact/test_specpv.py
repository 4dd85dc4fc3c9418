"""The method `specpv` as users meet it: what is approximate, what is kept, and what its text depends on."""

from __future__ import annotations

import pytest
import torch

from longdraft import PromptCache, Speculator
from tests.support.tiny import tiny_model

SMALL = {"budget": 8, "sink": 4, "recent": 4, "block": 4, "margin": 6}
PROMPTS = [[(7 * i * i + 3 * i) % 11 for i in range(n)] for n in (90, 41, 8)]


@pytest.fixture
def model():
    return tiny_model(vocab=11, dtype=torch.float64)


def test_two_runs_on_one_prompt_cache(model):
    """The rows that a run leaves behind are exact, whatever was drafted or guessed when it ended."""
    ar = Speculator("ar", target=model)
    cache = PromptCache()
    spec = Speculator("specpv", target=model, drafter="prompt-lookup", **SMALL)
    for n in (17, 30):
        (result,) = spec.generate([PROMPTS[0]], max_new_tokens=n, cache=cache)
    assert result.partial_rounds > 0 and result.drafted > result.accepted and not result.exact
    longer = PROMPTS[0] + result.token_ids
    want = ar.generate([longer], max_new_tokens=20)[0].token_ids
    assert ar.generate([longer], max_new_tokens=20, cache=cache)[0].token_ids == want
    # And a shorter text in the same slot is not judged by the blocks of the longer one.
    got = Speculator("specpv", target=model, drafter="ar", **SMALL)
    want = got.generate([longer[:60]], max_new_tokens=20)[0].token_ids
    assert got.generate([longer[:60]], max_new_tokens=20, cache=cache)[0].token_ids == want


def test_the_text_is_the_same_whatever_the_clock_and_its_neighbours(model, monkeypatch):
    monkeypatch.delenv("LONGDRAFT_PLAN", raising=False)
    spec = Speculator("specpv", target=model, drafter="prompt-lookup", min_n=1, **SMALL)
    assert spec.planner() is None and "plan=fixed" in repr(spec)
    prompts = [PROMPTS[0], PROMPTS[0][:61], PROMPTS[1]]
    alone = [spec.generate([prompt], max_new_tokens=60)[0] for prompt in prompts]
    assert all(0 < r.accepted < r.drafted and r.partial_rounds for r in alone)
    for batch in (2, 3):
        together = spec.generate(prompts, max_new_tokens=60, batch=batch)
        assert [r.token_ids for r in together] == [r.token_ids for r in alone]
