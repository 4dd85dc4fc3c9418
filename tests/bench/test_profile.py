"""Where a round's time goes: what is measured adds up, and changes nothing."""

from __future__ import annotations

import pytest

from longdraft import LoadedModel, Sampling, Speculator
from longdraft.bench.contenders import Job
from longdraft.bench.profile import PARTS, profile
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
    found = profile(spec, job(), rounds=6)
    assert found is not None and 1 <= found.rounds <= 6 and list(found.seconds) == list(PARTS)
    assert all(found.seconds[part] > 0 for part in ("draft", "attention", "forward")) and found.seconds["rest"] >= 0
    assert 0 < found.prefix_share < 1
    assert spec.runner().clock is None  # the target is as it was
    assert spec.generate(list(PROMPT), max_new_tokens=24, eos_token_ids=[])[0].token_ids == before


def test_parts_add_up_to_the_round(loaded, spec_of, monkeypatch):
    """On a clock that ticks by one at each look, nothing is counted twice and nothing is lost."""
    ticks = iter(range(10**6))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    spec, rounds = spec_of("longspec", widths=(3, 2)), []
    stream = spec.stream

    class Watched:
        """A run, of which the seconds of its rounds are noted."""

        def __init__(self, *arguments, **options):
            self.run = stream(*arguments, **options)

        def __getattr__(self, name):
            return getattr(self.run, name)

        def __iter__(self):
            for step in self.run:
                rounds.extend([step.seconds] if step.mode != "prefill" and step.seconds else [])
                yield step

    monkeypatch.setattr(spec, "stream", Watched)
    found = profile(spec, job(), rounds=4)
    assert sum(found.seconds.values()) == pytest.approx(sum(rounds[1:5]) / 4)
    # Every layer looks at the clock before and after its attention, which is no part of the rest of verifying.
    layers = loaded.model.config.num_hidden_layers
    assert (found.seconds["attention"], found.seconds["forward"]) == pytest.approx((layers, layers + 1))


def test_a_batch_that_is_drawn_and_one_token(spec_of):
    found = profile(spec_of("prompt-lookup"), job((PROMPT, PROMPT[:7]), temperature=1.0), rounds=3)
    assert found.rounds == 3 and 0 < found.prefix_share < 1
    assert profile(spec_of("ar"), job(max_tokens=1)) is None
