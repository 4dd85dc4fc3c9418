"""Texts on each side of LongRoPE's switch: what the model writes that reads the whole text anew for each token."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from longdraft import PromptCache, Request, Speculator
from longdraft.errors import ContextError
from tests.support.long_rope_models import KINDS, SWITCH, greedy_without_cache, long_rope_model
from tests.support.methods import EXACT, SpeculatorsByMethod
from tests.support.slow_marks import rotate_pairs, slow_except

NEW = 14
# Below the switch to the end, and beyond it from the start.
LENGTHS = (SWITCH - NEW - 3, SWITCH - NEW, SWITCH + 1, SWITCH + 9)


def prompt_of(length: int) -> list[int]:
    return [(7 * i * i + 3) % 59 + 1 for i in range(length)]


PROMPTS = [prompt_of(length) for length in LENGTHS]


@cache
def written(kind: str) -> list[list[int]]:
    return [greedy_without_cache(long_rope_model(kind), prompt, NEW) for prompt in PROMPTS]


@pytest.mark.parametrize(("kind", "method"), rotate_pairs(KINDS, ["prompt-lookup", "self", "ar"]))
def test_each_text_of_a_batch_is_what_the_whole_text_gives(kind, method):
    model = long_rope_model(kind)
    before = model.model.rotary_emb.inv_freq.clone()
    spec = Speculator(method, target=model, plan="fixed")
    # The right tokens are drafted.
    requests = [
        Request(prompt, max_new_tokens=NEW, predicted=prompt + own)
        for prompt, own in zip(PROMPTS, written(kind), strict=True)
    ]
    assert [result.token_ids for result in spec.generate(requests)] == written(kind)
    assert torch.equal(model.model.rotary_emb.inv_freq, before)


@pytest.mark.parametrize("length", [SWITCH - NEW + 1, SWITCH])
def test_a_text_that_would_cross_is_refused_by_name(length):
    spec = Speculator("prompt-lookup", target=long_rope_model())
    with pytest.raises(ContextError, match="LongRoPE"):
        spec.generate(prompt_of(length), max_new_tokens=NEW)
    # What the server bounds answers by.
    assert [spec.runner().max_context_length(n) for n in (1, SWITCH, SWITCH + 1)] == [SWITCH, SWITCH, 96]
    if length < SWITCH:
        (result,) = spec.generate(prompt_of(length), max_new_tokens=SWITCH - length)
        assert result.new_tokens == SWITCH - length


@pytest.fixture(scope="module")
def specs(tmp_path_factory):
    made = SpeculatorsByMethod(tmp_path_factory.mktemp("drafts"))
    made.model = long_rope_model("llama", torch.float64)
    return made


@pytest.mark.parametrize("method", slow_except(EXACT, ("longspec", "eagle3", "specextend")))
def test_every_exact_method_stays_on_both_sides(specs, method):
    prompts = [prompt_of(length) for length in (SWITCH - NEW, SWITCH + 5)]
    got = [result.token_ids for result in specs.get(method).generate(prompts, max_new_tokens=NEW)]
    assert got == [greedy_without_cache(specs.model, prompt, NEW) for prompt in prompts]


def test_rows_of_short_texts_are_not_reused_in_long_ones(tmp_path):
    model, cache, text = long_rope_model(), PromptCache(), prompt_of(SWITCH + 9)
    spec = Speculator("prompt-lookup", target=model, plan="fixed")
    reused = []
    # Short, long, long again, short again, long.
    for length in (SWITCH - NEW, SWITCH + 9, SWITCH + 5, SWITCH - NEW, SWITCH + 9):
        (result,) = spec.generate(text[:length], max_new_tokens=NEW, cache=cache)
        assert result.token_ids == greedy_without_cache(model, text[:length], NEW)
        reused.append(result.cached_tokens)
    assert reused[0] == reused[1] == reused[3] == 0
    assert reused[2] == SWITCH + 4 and reused[4] == 0
    cache.save(tmp_path / "long", spec.runner().fingerprint)
    for length, known in ((SWITCH + 9, SWITCH + 8), (SWITCH - NEW, 0)):
        restored = PromptCache.restored(tmp_path / "long", spec.runner().fingerprint)
        (result,) = spec.generate(text[:length], max_new_tokens=NEW, cache=restored)
        assert (result.token_ids, result.cached_tokens) == (greedy_without_cache(model, text[:length], NEW), known)


def test_equal_factors_have_no_switch():
    model = long_rope_model("llama")
    model.config.rope_parameters["long_factor"] = model.config.rope_parameters["short_factor"]
    spec = Speculator("ar", target=model)
    (result,) = spec.generate(prompt_of(SWITCH), max_new_tokens=NEW)
    assert result.token_ids == greedy_without_cache(model, prompt_of(SWITCH), NEW)
