"""Profiles of rounds: the parts add up, and the output does not change."""

from __future__ import annotations

import pytest

from longdraft import Sampling
from longdraft.bench.contenders import Job
from longdraft.bench.profile import PARTS, profile_job
from tests.support.methods import METHODS, PARTIAL, PROMPTS, Case

CASES = {name: METHODS[name] for name in ("ar", "prompt-lookup", "longspec", "eagle3")}
CASES["specpv"] = Case("specpv", None, PARTIAL | {"drafter": "prompt-lookup"})


def job(*prompts, max_tokens=24, **sampling):
    return Job(prompts or (PROMPTS[0],), max_tokens, Sampling(**sampling), 0, frozenset())


@pytest.mark.parametrize("name", CASES)
def test_every_method(spec_factory, name):
    spec = spec_factory.spec(CASES[name], plan="fixed")
    before = spec.generate(list(PROMPTS[0]), max_new_tokens=24, eos_token_ids=[])[0].token_ids
    found = profile_job(spec, job(), None, rounds=6)
    assert found is not None and 1 <= found["rounds"] <= 6 and {*found["seconds"]} == {*PARTS}
    assert all(found["seconds"][part] > 0 for part in ("draft", "attention", "forward"))
    assert found["seconds"]["rest"] >= 0 and 0 < found["prefix_share"] < 1
    assert spec.runner().profiler is None  # the target is as it was
    assert spec.generate(list(PROMPTS[0]), max_new_tokens=24, eos_token_ids=[])[0].token_ids == before


def test_a_batch_that_is_drawn_and_one_token(spec_factory):
    spec = spec_factory.spec(CASES["prompt-lookup"], plan="fixed")
    found = profile_job(spec, job(PROMPTS[0], PROMPTS[1], temperature=1.0), None, rounds=3)
    assert found["rounds"] == 3 and 0 < found["prefix_share"] < 1
    assert profile_job(spec_factory.spec(CASES["ar"]), job(max_tokens=1), None) is None
