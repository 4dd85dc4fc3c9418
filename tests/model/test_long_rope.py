"""Texts on both sides of LongRoPE's switch: what the model writes that reads the whole text anew for each token."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from longdraft import PromptCache, Request, Speculator
from tests.support.long_rope_models import KINDS, SWITCH, as_a_whole, long_rope_model
from tests.support.methods import EXACT, Specs
from tests.support.quick import few, in_turn

NEW = 14
# Below the switch to the end, across it (at once, early and late), and beyond it from the start.
LENGTHS = (SWITCH - NEW, SWITCH - NEW + 2, SWITCH - 4, SWITCH - 1, SWITCH, SWITCH + 1, SWITCH + 9)


def prompt_of(length: int) -> list[int]:
    return [(7 * i * i + 3) % 59 + 1 for i in range(length)]


PROMPTS = [prompt_of(length) for length in LENGTHS]


@cache
def written(kind: str) -> list[list[int]]:
    return [as_a_whole(long_rope_model(kind), prompt, NEW) for prompt in PROMPTS]


@pytest.mark.parametrize(("kind", "method"), in_turn(KINDS, ["prompt-lookup", "self", "ar"]))
def test_each_text_of_a_batch_is_what_the_whole_text_gives(kind, method):
    spec = Speculator(method, target=long_rope_model(kind), plan="fixed")
    # The right tokens are drafted beyond the switch too.
    requests = [
        Request(prompt, max_new_tokens=NEW, predicted=prompt + own)
        for prompt, own in zip(PROMPTS, written(kind), strict=True)
    ]
    assert [result.token_ids for result in spec.generate(requests)] == written(kind)
    (alone,) = spec.generate(PROMPTS[2], max_new_tokens=NEW)
    assert alone.token_ids == written(kind)[2]


def test_reading_anew_is_a_part_of_decoding_and_no_round_and_the_model_keeps_its_frequencies():
    model = long_rope_model()
    before = model.model.rotary_emb.inv_freq.clone()
    run = Speculator("ar", target=model).stream(prompt_of(SWITCH - 2), max_new_tokens=NEW)
    anew = [step for step in run if step.mode != "prefill" and step.tree is None]
    assert len(anew) == 1 and not anew[0].token_ids and anew[0].seconds > 0
    assert run.results()[0].rounds == NEW - 1
    assert torch.equal(model.model.rotary_emb.inv_freq, before)


@pytest.mark.parametrize("length", [LENGTHS[0], LENGTHS[-1]])
def test_where_a_text_stays_on_one_side_it_is_generates(length):
    model, ids = long_rope_model(), torch.tensor([prompt_of(length)])
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False}
    ours = model.generate(ids, **settings, custom_generate=Speculator("prompt-lookup", target=model))
    assert torch.equal(ours, model.generate(ids, **settings))


@pytest.fixture(scope="module")
def specs(tmp_path_factory):
    made = Specs(tmp_path_factory.mktemp("drafts"))
    made.model = long_rope_model("llama", torch.float64)
    return made


@pytest.mark.parametrize(
    "method",
    few(EXACT, ("ar", "longspec", "eagle3", "specextend", "self", "tokenswift")),
)
def test_every_exact_method_crosses_the_switch(specs, method):
    prompts = [prompt_of(length) for length in (SWITCH - 6, SWITCH, SWITCH + 5)]
    got = [result.token_ids for result in specs.get(method).generate(prompts, max_new_tokens=NEW)]
    assert got == [as_a_whole(specs.model, prompt, NEW) for prompt in prompts]


def test_partial_verification_crosses_the_switch():
    model, prompt = long_rope_model(), prompt_of(SWITCH - 4)
    sizes = {"drafter": "prompt-lookup", "budget": 8, "sink": 4, "recent": 4, "block": 4, "margin": 4}
    run = Speculator("specpv", target=model, **sizes).stream(prompt, max_new_tokens=NEW)
    modes = [step.mode for step in run]
    (result,) = run.results()
    anew = modes.index("full", 1)
    assert "partial" in modes[:anew] and "partial" in modes[anew:] and result.new_tokens == NEW
    # The first token behind the switch is one of the whole text with the long factors.
    written = prompt + result.token_ids
    assert as_a_whole(model, written[: SWITCH + 1], 1) == [written[SWITCH + 1]]


def test_rows_of_short_texts_are_not_reused_in_long_ones(tmp_path):
    model, cache, text = long_rope_model(), PromptCache(), prompt_of(SWITCH + 9)
    spec = Speculator("prompt-lookup", target=model, plan="fixed")
    reused = []
    # Short, long, long again, short again, and one that grows across.
    for length in (SWITCH - NEW, SWITCH + 9, SWITCH + 5, SWITCH - NEW, SWITCH - 4, SWITCH + 9):
        (result,) = spec.generate(text[:length], max_new_tokens=NEW, cache=cache)
        assert result.token_ids == as_a_whole(model, text[:length], NEW)
        reused.append(result.cached_tokens)
    assert reused[0] == reused[1] == reused[3] == 0
    assert reused[2] == SWITCH + 4 and reused[4] == SWITCH - NEW
    assert reused[5]  # the text that grew across was read anew, and its rows serve long texts
    cache.save(tmp_path / "long", spec.runner().fingerprint)
    for length, known in ((SWITCH + 9, SWITCH + 8), (SWITCH - NEW, 0)):
        restored = PromptCache.restored(tmp_path / "long", spec.runner().fingerprint)
        (result,) = spec.generate(text[:length], max_new_tokens=NEW, cache=restored)
        assert (result.token_ids, result.cached_tokens) == (as_a_whole(model, text[:length], NEW), known)


def test_equal_factors_have_no_switch():
    model = long_rope_model("llama")
    model.config.rope_parameters["long_factor"] = model.config.rope_parameters["short_factor"]
    spec = Speculator("ar", target=model)
    (result,) = spec.generate(prompt_of(SWITCH), max_new_tokens=NEW)
    assert result.token_ids == as_a_whole(model, prompt_of(SWITCH), NEW)
