"""Profiles of rounds: the parts add up, and the output does not change."""

from __future__ import annotations

import pytest

from longdraft import LoadedModel, Sampling, Speculator
from longdraft.bench.contenders import Job
from longdraft.bench.profile import PARTS, profile_job
from tests.support.drafts import random_draft, random_eagle3
from tests.support.tiny import tiny_model, tiny_tokenizer

PROMPT = tuple(range(5, 45))
PARTIAL = {"drafter": "prompt-lookup", "budget": 16, "sink": 4, "recent": 8, "block": 4}


@pytest.fixture(scope="module")
def loaded():
    return LoadedModel(tiny_model(context=512, layers=6), tiny_tokenizer(chat=True))


@pytest.fixture(scope="module")
def spec_of(loaded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafts")
    drafts = {
        "longspec": random_draft(folder / "longspec", loaded.model),
        "eagle3": random_eagle3(folder / "eagle3", loaded.model),
    }

    def made(name, **options):
        draft = {"draft": drafts[name]} if name in drafts else {}
        return Speculator(name, target=loaded.model, tokenizer=loaded.tokenizer, plan="fixed", **draft, **options)

    return made


def job(prompts=(PROMPT,), max_tokens=24, **sampling):
    return Job(prompts, max_tokens, Sampling(**sampling), 0, frozenset())


@pytest.mark.parametrize(
    ("name", "options"),
    [("ar", {}), ("prompt-lookup", {}), ("longspec", {"widths": (3, 2)}), ("eagle3", {}), ("specpv", PARTIAL)],
)
def test_every_method(spec_of, name, options):
    spec = spec_of(name, **options)
    before = spec.generate(list(PROMPT), max_new_tokens=24, eos_token_ids=[])[0].token_ids
    found = profile_job(spec, job(), None, rounds=6)
    assert found is not None and 1 <= found["rounds"] <= 6 and list(found["seconds"]) == list(PARTS)
    assert (
        all(found["seconds"][part] > 0 for part in ("draft", "attention", "forward")) and found["seconds"]["rest"] >= 0
    )
    assert 0 < found["prefix_share"] < 1
    assert spec.runner().profiler is None  # the target is as it was
    assert spec.generate(list(PROMPT), max_new_tokens=24, eos_token_ids=[])[0].token_ids == before


def test_a_batch_that_is_drawn_and_one_token(spec_of):
    found = profile_job(spec_of("prompt-lookup"), job((PROMPT, PROMPT[:7]), temperature=1.0), None, rounds=3)
    assert found["rounds"] == 3 and 0 < found["prefix_share"] < 1
    assert profile_job(spec_of("ar"), job(max_tokens=1), None) is None
