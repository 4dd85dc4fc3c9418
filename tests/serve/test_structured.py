"""Structured output follows its grammar with any model and method."""

from __future__ import annotations

import copy
import json

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("fastapi")

from longdraft import Request, Speculator
from longdraft.errors import CapabilityError
from longdraft.serve import structured
from tests.serve.bytes import byte_model, byte_tokenizer
from tests.support.tiny import tiny_tokenizer

MODEL, TOKENIZER = byte_model(), byte_tokenizer()


def decoded(grammar: str, *seeds: int, method: str = "ar", n: int = 600, ahead: bool = True, temperature: float = 1.0):
    """An answer for each seed, decoded together. ``ahead``: forced tokens are drafted."""
    prompt = TOKENIZER("say it")["input_ids"]

    def request(seed: int) -> Request:
        constraint = structured.Constraint(TOKENIZER, grammar, len(prompt))
        processor = constraint if ahead else lambda ids, scores: constraint(ids, scores)
        return Request(prompt, max_new_tokens=n, temperature=temperature, seed=seed, processors=[processor])

    return Speculator(method, MODEL, TOKENIZER, plan="fixed").generate([request(seed) for seed in seeds])


PERSON = {
    "type": "object", "required": ["first name", "age"], "additionalProperties": False,
    "properties": {"first name": {"enum": ["Ada", "Alan", "Bo"]}, "age": {"type": "integer", "maximum": 99}},
}  # fmt: skip


@pytest.mark.parametrize("method", ["prompt-lookup", "self"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_of_the_schema_and_what_that_forces_is_drafted_and_changes_nothing(method, temperature):
    words = {"type": "array", "items": {"enum": ["alpha", "beta"]}, "minItems": 2, "maxItems": 4}
    schema = {**PERSON, "properties": {**PERSON["properties"], "words": words}}
    grammar, seeds = structured.json_grammar(schema), (1, 2, 3)
    plain = decoded(grammar, *seeds, temperature=temperature)
    without = decoded(grammar, *seeds, method=method, temperature=temperature, ahead=False)
    drafted = decoded(grammar, *seeds, method=method, temperature=temperature)
    assert [r.token_ids for r in plain] == [r.token_ids for r in without] == [r.token_ids for r in drafted]
    assert 2 * sum(r.rounds for r in drafted) < sum(r.rounds for r in without)
    for result in plain:
        found = json.loads(result.text)
        assert result.finish_reason == "eos" and found["first name"] in ("Ada", "Alan", "Bo") and found["age"] <= 99
        assert type(found["age"]) is int and found.keys() <= {"first name", "age", "words"}
        assert 2 <= len(found.get("words", "ab")) <= 4 and {*found.get("words", ())} <= {"alpha", "beta"}


def test_a_copy_of_a_constraint_goes_on_where_it_stood():
    constraint = structured.Constraint(TOKENIZER, structured.json_grammar(PERSON), 0)
    begun, forced = TOKENIZER('{"first name":"B')["input_ids"], TOKENIZER('o","age":')["input_ids"]
    constraint.advance_to(begun)
    twin = copy.deepcopy(constraint)
    twin.advance_to([*begun, forced[0]])
    assert (constraint.forced_tokens(), twin.forced_tokens()) == (forced, forced[1:])


def test_a_tokenizer_without_a_grammar_is_refused():
    with pytest.raises(CapabilityError):
        structured.Constraint(tiny_tokenizer(eos=True), structured.json_grammar({"type": "object"}), 1)
