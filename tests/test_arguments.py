"""What a newcomer gives: each wrong argument ends in an error of ours that says what to do."""

from __future__ import annotations

import inspect
import typing

import numpy as np
import pytest
import torch

import longdraft
from longdraft import LongdraftError, PromptCache, Request, Sampling, Speculator
from longdraft.errors import ArgumentError, PromptError, RequestError, UnsupportedModelError
from tests.tiny import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def model():
    return tiny_model(context=256)


@pytest.fixture(scope="module")
def spec(model):
    return Speculator("prompt-lookup", target=model, tokenizer=tiny_tokenizer(chat=True))


def tokens(spec, prompts, **settings):
    return [r.token_ids for r in spec.generate(prompts, max_new_tokens=4, **settings)]


# --- prompts ---


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([], "There is no prompt"),
        ([[]], "The prompt is empty"),
        ("", "The prompt is empty"),
        (123, "A prompt is a text, a list of token ids or a Request: not 123"),
        (None, "not None"),
        (b"abc", "not b'abc'"),
        ([1, "a"], "Prompt 0 of the list: A prompt is a text"),
        (["a", 3], "Prompt 1 of the list: A prompt is a text"),
        ([[1.5, 2]], "whole numbers: not 1.5"),
        ([True], "not True"),
        ([10**30], "token id 1000000000000000000000000000000"),
        ({"input_ids": [1]}, "input_ids"),
        ([{"role": "user", "content": "Hi"}], "apply_chat_template"),
        ([[{"role": "user", "content": "Hi"}]], "apply_chat_template"),
        (Request(5), "not 5"),
        (Request(["a", "b"]), "whole numbers: not 'a'"),
    ],
    ids=repr,
)
def test_what_is_no_prompt(spec, prompt, said):
    with pytest.raises(PromptError) as caught:
        spec.generate(prompt)
    assert said in str(caught.value)


def test_what_else_is_a_prompt(spec):
    ids = [5, 6, 7, 5, 6]
    expected = tokens(spec, [ids])
    tuples = [tuple(ids), torch.tensor(ids), np.array(ids), torch.tensor([ids]), [torch.tensor(ids)], iter([ids])]
    for prompt in tuples:
        assert tokens(spec, prompt) == expected
    assert tokens(spec, range(5, 8)) == tokens(spec, [5, 6, 7])
    assert tokens(spec, (text for text in ("one", "two"))) == tokens(spec, ["one", "two"])


# --- settings ---


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sampling": 0.7}, "longdraft.Sampling(temperature=0.7, ...), got 0.7"),
        ({"sampling": Sampling(0.7), "temperature": 0.7}, "sampling and temperature say the same thing"),
        ({"temperature": "x"}, "temperature must be a number, got 'x'"),
        ({"temperature": -1}, "temperature must not be negative"),
        ({"temperature": 0.5, "top_p": 2}, "top_p must lie above 0"),
        ({"temperature": 0.5, "top_k": 1.5}, "top_k must be a whole number"),
        ({"top_p": 0.9}, "give a temperature above 0 too"),
        ({"repetition_penalty": 0}, "repetition_penalty must lie above 0"),
        ({"max_new_tokens": "2"}, "max_new_tokens must be a whole number, got '2'"),
        ({"max_new_tokens": True}, "max_new_tokens must be a whole number"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"seed": "x"}, "seed must be a whole number"),
        ({"seed": 2**70}, "seed must be from"),
        ({"stop": [""]}, "stop has an empty string"),
        ({"stop": ""}, "stop has an empty string"),
        ({"stop": [1]}, "eos_token_ids"),
        ({"stop": 1}, "stop takes a list"),
        ({"eos_token_ids": "a"}, "eos_token_ids takes a list"),
        ({"eos_token_ids": ["a"]}, "eos_token_ids must be a whole number"),
        ({"chat": "no"}, "chat must be True or False"),
        ({"batch": "2"}, "batch must be a whole number"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"cache": True}, "cache takes a longdraft.PromptCache()"),
        ({"cancelled": True}, "cancelled is a function"),
    ],
    ids=repr,
)
def test_what_is_no_setting(spec, settings, said):
    with pytest.raises(RequestError) as caught:
        spec.generate("one", **settings)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_tokens": 4}, "generate has no argument max_tokens: it is max_new_tokens here."),
        ({"stop_strings": ["."]}, "it is stop here"),
        ({"do_sample": True}, "temperature=0 is greedy"),
        ({"num_beams": 2}, "leave it out"),
        ({"eos_token_id": 2}, "it is eos_token_ids here"),
        ({"temprature": 2}, "did you mean temperature?"),
        ({"foo": 2}, "it has prompts, max_new_tokens"),
    ],
    ids=repr,
)
def test_an_argument_that_there_is_not_is_answered(spec, settings, said):
    for call in (spec.generate, spec.stream):
        with pytest.raises(ArgumentError) as caught:
            call("one", **settings)
        assert said.replace("generate", call.__name__) in str(caught.value)
    assert isinstance(caught.value, TypeError) and isinstance(caught.value, LongdraftError)
    with pytest.raises(ArgumentError):
        spec.generate("one", 64)


def test_the_signatures_are_typed():
    for call in (Speculator.generate, Speculator.stream):
        parameters = inspect.signature(call).parameters.values()
        assert not [p for p in parameters if p.kind is p.VAR_KEYWORD]
        assert {p.name for p in parameters} >= {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
        assert all(p.annotation is not p.empty for p in parameters if p.name != "self")
    assert typing.get_type_hints(Request)["stop"]


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


# --- what is made before ---


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"target": "gpt2"}, UnsupportedModelError, "longdraft.load"),
        ({"tokenizer": "gpt2"}, RequestError, "AutoTokenizer"),
        ({"method": 5}, RequestError, "Speculator(target=model)"),
        ({"method": ""}, LongdraftError, "There is no method ''"),
        ({"method": "longspecs"}, LongdraftError, "did you mean longspec?"),
        ({"draft": 5}, RequestError, "draft takes a draft folder"),
        (
            {"method": "prompt-lookup", "branches": "x"},
            RequestError,
            "branches must be a whole number of at least 1, got 'x'",
        ),
        ({"method": "prompt-lookup", "branches": 0}, RequestError, "at least 1"),
        ({"method": "prompt-lookup", "branch": 2}, RequestError, "did you mean branches?"),
        ({"branch": 2}, RequestError, "did you mean branches?"),
        ({"branches": 0}, RequestError, "at least 1"),
        ({"branches": 2, "widths": (2, 2)}, RequestError, "branches and widths together"),
        ({"reduction": "max"}, RequestError, "it is one of"),
        ({"model": 5}, RequestError, "it is target here"),
        ({"temperature": 0.7}, RequestError, "a setting of what is generated"),
        ({"method": "ar", "max_new_tokens": 7}, RequestError, "a setting of what is generated"),
        ({"method": "longspec", "widths": (0,)}, RequestError, "widths must be"),
        ({"plan": 5}, RequestError, "plan must be auto or fixed"),
        ({"offload": 5}, RequestError, "offload takes"),
        ({"kv_dtype": "fp8"}, RequestError, "kv_dtype must be"),
    ],
    ids=repr,
)
def test_what_makes_no_speculator(arguments, error, said):
    with pytest.raises(error) as caught:
        Speculator(**arguments)
    assert isinstance(caught.value, LongdraftError) and said in str(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda: Speculator("ar").generate("one"),
        lambda: Speculator("ar").decode([1]),
        lambda: Sampling(temperature=None),
        lambda: Sampling(temp=1),
        lambda: Request("one", temperatur=1),
        lambda: longdraft.load(5),
        lambda: longdraft.load(dtype=5),
        lambda: longdraft.load(device=5),
        lambda: longdraft.load(rope_factor="x"),
        lambda: longdraft.load(weights="x"),
        lambda: longdraft.load(torch_dtype="float32"),
        lambda: longdraft.compose("mine", 5),
        lambda: longdraft.compose(5, 5),
        lambda: longdraft.register(5),
        lambda: PromptCache().save("x", "y"),
    ],
)
def test_every_error_is_ours(call):
    with pytest.raises(LongdraftError):
        call()


def test_sessions_answer_too(spec):
    with pytest.raises(RequestError, match="context"):
        spec.session(context="2")
    with pytest.raises(PromptError):
        spec.session().add(5)


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


def test_a_notebook_shows_drafted_tokens_in_colour(spec):
    (result,) = spec.generate("<b> & <b> & <b>", max_new_tokens=60, temperature=0.8, seed=1, eos_token_ids=[])
    html = result._repr_html_()
    assert any(result.from_draft) and '<span style="color' in html and "drafted and accepted" in html
    assert result.summary in html and "<b>" not in html
    untold = Speculator("ar", target=spec.runner().model).generate([5, 6], max_new_tokens=2)[0]
    assert " ".join(map(str, untold.token_ids)) in untold._repr_html_()


def test_an_option_by_two_of_its_names():
    assert Speculator("specextend", every=4).options == {"refresh": 4}
    for options in ({"every": 4, "refresh": 3}, {"refresh": 3, "every": 4}):
        with pytest.raises(RequestError, match="every"):
            Speculator("specextend", **options)
