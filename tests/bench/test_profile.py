"""Where a round's time goes: what is measured adds up, and changes nothing."""

from __future__ import annotations

import pytest
import torch

from longdraft import LoadedModel, Sampling, Speculator
from longdraft.bench.contenders import Job
from longdraft.bench.data import Sample
from longdraft.bench.profile import PARTS, held_bytes, profile
from longdraft.bench.prompts import batches, prepare
from longdraft.bench.results import line
from longdraft.bench.run import Bench
from longdraft.bench.settings import Settings
from tests.drafts import random_draft, random_eagle3
from tests.tiny import tiny_model, tiny_tokenizer

PROMPT = tuple(range(5, 45))


@pytest.fixture(scope="module")
def loaded():
    return LoadedModel(tiny_model(context=512, layers=6), tiny_tokenizer(chat=True))


@pytest.fixture(scope="module")
def drafts(loaded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafts")
    return {
        "longspec": random_draft(folder / "longspec", loaded.model),
        "eagle3": random_eagle3(folder / "eagle3", loaded.model),
    }


def job(prompts=(PROMPT,), max_tokens=24, **sampling):
    return Job(prompts, max_tokens, Sampling(**sampling), 0, frozenset())


def spec_of(loaded, drafts, name, **options):
    draft = {"draft": drafts[name]} if name in drafts else {}
    return Speculator(name, target=loaded.model, tokenizer=loaded.tokenizer, plan="fixed", **draft, **options)


CASES = [
    ("ar", {}),
    ("prompt-lookup", {}),
    ("longspec", {"widths": (3, 2)}),
    ("eagle3", {}),
    ("specpv", {"drafter": "prompt-lookup", "budget": 16, "sink": 4, "recent": 8, "block": 4}),
    ("specpv-exact", {"drafter": "prompt-lookup", "budget": 16, "sink": 4, "recent": 8, "block": 4}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_every_method(loaded, drafts, name, options):
    spec = spec_of(loaded, drafts, name, **options)
    work = job()
    before = spec.generate(list(PROMPT), max_new_tokens=24, eos_token_ids=[])[0].token_ids
    found = profile(spec, work, rounds=6)
    assert found is not None and 1 <= found.rounds <= 6
    assert set(found.seconds) == set(PARTS)
    assert all(seconds >= 0 for seconds in found.seconds.values())
    assert found.seconds["attention"] > 0 and found.seconds["forward"] > 0
    assert (found.seconds["draft"] > 0.0) and 0 < found.prefix_share < 1
    parameters = {p.data_ptr(): p.numel() * 4 for p in loaded.model.parameters()}
    assert found.memory["weights"] >= sum(parameters.values())
    assert found.memory["kv"] > 0
    assert (found.memory["draft"] > 0) == (name in drafts)
    assert spec.runner().clock is None  # the target is as it was
    assert spec.generate(list(PROMPT), max_new_tokens=24, eos_token_ids=[])[0].token_ids == before


def test_parts_add_up_to_the_round(loaded, drafts, monkeypatch):
    """On a clock that ticks by one at each look, nothing is counted twice and nothing is lost."""
    ticks = iter(range(10**6))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    rounds = []

    class Run:
        def __init__(self, run):
            self.run = run

        def __getattr__(self, name):
            return getattr(self.run, name)

        def __iter__(self):
            for step in self.run:
                if step.mode != "prefill":
                    rounds.append(step.seconds)
                yield step

    class Watched(Speculator):
        def stream(self, *arguments, **options):
            return Run(super().stream(*arguments, **options))

    given = {"draft": drafts["longspec"], "plan": "fixed", "widths": (3, 2)}
    spec = Watched("longspec", target=loaded.model, tokenizer=loaded.tokenizer, **given)
    found = profile(spec, job(), rounds=4)
    assert sum(found.seconds.values()) == pytest.approx(sum(rounds[1:5]) / 4)
    # Every layer looks at the clock before and after.
    assert found.seconds["attention"] == pytest.approx(loaded.model.config.num_hidden_layers)


def test_a_batch_and_a_draw(loaded, drafts):
    spec = spec_of(loaded, drafts, "prompt-lookup")
    found = profile(spec, job((PROMPT, PROMPT[:7]), temperature=1.0), rounds=3)
    assert found.rounds == 3 and 0 < found.prefix_share < 1


def test_nothing_after_the_first_token(loaded, drafts):
    assert profile(spec_of(loaded, drafts, "ar"), job(max_tokens=1)) is None


def test_held_bytes_counts_a_storage_once():
    a = torch.zeros(10)
    assert held_bytes([[a, a[2:], {"x": a}]]) == 40
    assert held_bytes([[a, torch.zeros(5)]], but=[[a[:3]]]) == 20
    assert held_bytes([[object(), None, "text"]]) == 0


def test_the_bench_takes_profiles_of_ours_alone(loaded):
    wanted = Settings(methods=("ar", "prompt-lookup", "hf"), max_tokens=8, repeats=1, ignore_eos=True, profile=True)
    prompts = prepare([Sample("one two one two " * 4, "", "a", "a:1")], loaded, wanted)
    measured = Bench(loaded, wanted).measure(batches(prompts, 1)[0][0])
    assert set(measured.profiles) == {"ar", "prompt-lookup"}
    assert set(line(measured)["profiles"]["ar"]) == {"rounds", "seconds", "prefix_share", "memory"}
    without = Bench(loaded, Settings(methods=("ar",), max_tokens=8, repeats=1)).measure(batches(prompts, 1)[0][0])
    assert without.profiles == {}
