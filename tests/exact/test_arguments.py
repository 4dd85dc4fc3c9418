"""What a newcomer gives, and what things say of themselves."""

from __future__ import annotations

import typing

import numpy as np
import pytest
import torch

import longdraft
from longdraft import PromptCache, Request, Sampling, Speculator
from longdraft.engine.request import RequestSettings
from tests.support.tiny import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def model():
    return tiny_model(context=256)


@pytest.fixture(scope="module")
def spec(model):
    return Speculator("prompt-lookup", target=model, tokenizer=tiny_tokenizer(chat=True))


def tokens(spec, prompts, **settings):
    return [r.token_ids for r in spec.generate(prompts, max_new_tokens=4, **settings)]


def test_what_else_is_a_prompt(spec):
    ids = [5, 6, 7, 5, 6]
    expected = tokens(spec, [ids])
    tuples = [tuple(ids), torch.tensor(ids), np.array(ids), torch.tensor([ids]), [torch.tensor(ids)], iter([ids])]
    for prompt in tuples:
        assert tokens(spec, prompt) == expected
    assert tokens(spec, range(5, 8)) == tokens(spec, [5, 6, 7])
    assert tokens(spec, (text for text in ("one", "two"))) == tokens(spec, ["one", "two"])


def test_the_settings_of_a_call_are_typed_as_a_requests_are():
    of_request, of_call = typing.get_type_hints(Request), typing.get_type_hints(RequestSettings)
    assert {name: of_request[name] for name in of_call} == of_call
    assert {*of_request} - {*of_call} == {"prompt", "processors", "tenant", "predicted", "reuse"}


def test_settings_by_themselves_are_a_sampling(spec):
    given = {"temperature": 0.9, "top_p": 0.8, "top_k": 9, "min_p": 0.01, "repetition_penalty": 1.2}
    expected = tokens(spec, "one two", sampling=Sampling(**given), seed=3)
    assert tokens(spec, "one two", seed=3, **given) == expected
    assert tokens(spec, Request("one two", 4, seed=3, **given)) == expected
    assert tokens(spec, "one two", seed=3, temperature=2)  # a whole number


def test_one_stop_string_and_one_end(spec):
    plain = spec.generate("one two", max_new_tokens=12, eos_token_ids=[])[0]
    stop = plain.text[3:5]
    assert spec.generate("one two", max_new_tokens=12, eos_token_ids=[], stop=stop)[0].finish_reason == "stop"
    end = spec.generate("one two", max_new_tokens=12, eos_token_ids=plain.token_ids[2])[0]
    assert end.finish_reason == "eos"
    assert spec.generate("one two", max_new_tokens=2, stop=None)[0].new_tokens == 2


# --- what things say of themselves ---


def test_reprs_say_what_things_are(spec, model):
    assert repr(spec) == "Speculator('prompt-lookup', plan=fixed, target=LlamaForCausalLM)"
    assert repr(Speculator(target=model)) == repr(spec)  # what was chosen
    assert repr(Speculator("longspec", depth=3)) == "Speculator('longspec', plan=fixed, depth=3)"
    cache = PromptCache()
    assert repr(cache) == "PromptCache(empty)"
    run = spec.stream("one two", max_new_tokens=4, cache=cache)
    assert repr(run) == "Generation(prompt-lookup, 1 requests, 0 ended)"
    (result,) = run.results()
    assert repr(result).startswith(f"Result({result.text!r}, prompt-lookup, exact: {result.prompt_tokens} + 4 tokens")
    assert repr(cache) == f"PromptCache({result.prompt_tokens + 3} tokens)"
    assert "LlamaForCausalLM" in repr(longdraft.LoadedModel(model, spec.tokenizer))


@pytest.mark.parametrize("stop", [(), ("e", "ab", " q")])
def test_the_steps_texts_are_the_results(spec, stop):
    for seed in range(4):
        run = spec.stream("abc abc abc", max_new_tokens=40, temperature=1.2, seed=seed, stop=stop)
        text, flags = "", []
        for step in run:
            text += step.text
            flags += [drafted for piece, drafted in step.pieces for _ in piece]
        (result,) = run.results()
        assert text == result.text == "".join(piece.text for piece in result.pieces)
        if not stop:  # a token a character, but for special ones
            pairs = zip(result.token_ids, result.from_draft, strict=True)
            assert flags == [drafted for token, drafted in pairs if spec.decode([token])]


def test_an_option_by_two_of_its_names():
    assert Speculator("specextend", every=4).options == {"refresh": 4}
