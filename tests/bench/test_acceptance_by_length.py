"""``bench acceptance`` and ``bench length``: the choice of texts and targets, the counts, and the reports."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longdraft import LoadedModel, Sampling, Speculator
from longdraft.bench.acceptance import (
    AcceptanceBench,
    default_methods,
    lengths_by_rope_factor,
)
from longdraft.bench.data import Sample
from longdraft.bench.prompts import prompts_of_length
from longdraft.bench.settings import Settings
from longdraft.model.rope import stretch_rope
from longdraft.model.runner import TargetRunner
from tests.support.drafts import random_draft, random_eagle3, small_lm
from tests.support.tiny import tiny_model, tiny_tokenizer

SAMPLES = [Sample(f"the cat {i} sat on the mat. " * n, "why?", "a", f"a:{i}") for i, n in enumerate((9, 20, 3))]
TOKENS = 8


@pytest.fixture(scope="module")
def load():
    """A target of 256 tokens, stretched as ``longdraft.load`` does it."""

    def loaded(factor):
        model = tiny_model(layers=6, context=256, dtype=torch.float64)
        if factor is not None:
            stretch_rope(model.config, factor)
            model = type(model)(model.config).to(torch.float64)
            model.load_state_dict(tiny_model(layers=6, context=256, dtype=torch.float64).state_dict())
        return LoadedModel(model.eval(), tiny_tokenizer(chat=True))

    return loaded


@pytest.fixture(scope="module")
def drafts(load, tmp_path_factory):
    made = tmp_path_factory.mktemp("drafts")
    random_draft(made / "longspec", load(None).model)
    random_eagle3(made / "eagle3", load(None).model)
    return made


def measuring(load, drafts, temperatures=(0.0, 1.0)):
    own = {name: {"draft": drafts / name, "widths": (3, 3)} for name in ("longspec", "eagle3")}
    own["self"] = {"view": "snapkv", "budget": 64, "sink": 8, "window": 8, "chunk": 4}
    settings = Settings(tuple(own), TOKENS, contender_options=own, plan="fixed", ignore_eos=True)
    return AcceptanceBench(load(None), settings, load, temperatures, "tiny")


@pytest.mark.slow
def test_every_run_is_what_the_method_does_alone(load, drafts):
    """Without cached KV, and on the stretched target if the length needs it."""
    bench = measuring(load, drafts)
    steps = bench.steps(SAMPLES[1:2], (64, 200, 300), "leave")
    assert [{(key.rope_factor, key.length) for key in step.keys} for step in steps] == [
        {(None, 64), (None, 200)}, {(2.0, 300)},
    ]  # fmt: skip
    for step, factor in zip(steps, (None, 2.0), strict=True):
        loaded, found = load(factor), list(step.measure(step.keys, print))
        assert {run.asked for run in found} == set(step.keys)
        for run in found:
            (text,), _ = prompts_of_length(SAMPLES[1:2], run.asked.length, 10_000, loaded.tokenizer, "leave")
            options = bench.settings.options(run.asked.method)
            spec = Speculator(run.asked.method, loaded.model, plan="fixed", **options)
            (alone,) = spec.generate(
                [list(text.token_ids)], max_new_tokens=TOKENS, sampling=Sampling(temperature=run.asked.temperature),
                seed=text.seed, eos_token_ids=[],
            )  # fmt: skip
            assert run.prompt_tokens == run.asked.length
            assert (run.new_tokens, run.verifications) == (TOKENS - 1, alone.rounds)
            assert len(run.accepted) == alone.rounds


@given(st.lists(st.integers(1, 100_000), min_size=1), st.integers(1, 10_000))
def test_each_length_has_the_least_factor_that_holds_it(lengths, context):
    found = lengths_by_rope_factor(lengths, context)
    assert sorted(length for own in found.values() for length in own) == sorted(set(lengths))
    for factor, own in found.items():
        for length in own:
            assert length <= context * (factor or 1)
            assert factor is None or length > context * factor / 2
    # The target is loaded as it is first, and then stretched more and more.
    assert list(found) == sorted(found, key=lambda factor: factor or 0)


def cut(length, short, room=10_000):
    return prompts_of_length(SAMPLES, length, room, tiny_tokenizer(chat=True), short)


def test_texts_that_are_too_short():
    found, said = cut(200, "leave")
    assert [(t.sample.origin, len(t.token_ids)) for t in found] == [("a:0", 200), ("a:1", 200)]
    assert "1 of 3 texts are not that long" in said[0] and "left out" in said[0]
    found, said = cut(200, "keep")
    assert [len(t.token_ids) for t in found] == [200, 200, 87] and "taken as they are" in said[0]
    found, said = cut(200, "join")
    assert [(len(t.token_ids), t.joined) for t in found] == [(200, False), (200, False), (200, True)]
    assert "1 of 3 texts go on" in said[0]
    # Its own text comes first, and is cut as it would be alone.
    alone, _ = cut(80, "leave")
    assert found[2].token_ids[:60] == alone[2].token_ids[:60]
    assert cut(5000, "join")[0] == []
    assert "no text is that long" in cut(5000, "leave")[1][0]
    assert [len(t.token_ids) for t in cut(200, "leave", room=150)[0]] == [150, 150]


def test_the_drafts_that_come_along(load, drafts, shipped_in):
    target = TargetRunner(load(None).model)
    assert default_methods(target) == ()
    shipped_in(drafts)
    small_lm(drafts / "lm", vocab=61)
    config = json.loads((drafts / "longspec" / "config.json").read_text())
    (drafts / "lm" / "config.json").write_text(json.dumps({"drafter": "small-lm", "target": config["target"]}))
    # Not triforce, whose forwards of the model on a part of its KV would not be counted.
    assert set(default_methods(target)) == {"longspec", "eagle3", "specextend-eagle3", "small-lm", "specextend"}
