"""Schemas of tools as clients send them: none turns a request away, what can be followed is followed."""

from __future__ import annotations

import contextlib
import json

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

from tests.serve.bytes import byte_model, byte_tokenizer
from tests.serve.conftest import Running, make_service

WHERE = {"type": "object", "properties": {"town": {"enum": ["Rome", "Oslo"]}}, "required": ["town"]}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 9}


@pytest.fixture(scope="module")
def server():
    with contextlib.closing(Running(make_service(byte_model(), byte_tokenizer(), slots=2, context=1200))) as running:
        yield running


def called(server, *parameters, choice="required"):
    """The arguments of the call that comes when functions with these parameters are offered."""
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": p}} for i, p in enumerate(parameters)]
    body = {"messages": [{"role": "user", "content": "?"}], "tools": tools, "tool_choice": choice, "max_tokens": 400,
            "parallel_tool_calls": False, "seed": 3}  # fmt: skip
    status, answer = server.http("/v1/chat/completions", body)
    assert status == 200, answer
    (call,) = json.loads(answer)["choices"][0]["message"]["tool_calls"]
    return json.loads(call["function"]["arguments"])


@pytest.mark.parametrize("place", ["$defs", "definitions"])
def test_references_lead_to_the_tools_own_definitions(server, place):
    nested = {"type": "object", "properties": {"where": {"$ref": f"#/{place}/Where"}}, "required": ["where"]}
    assert called(server, nested | {place: {"Where": WHERE}})["where"]["town"] in ("Rome", "Oslo")
    # The other tool has something else under that name.
    named = {"type": "function", "function": {"name": "f1"}}
    other = nested | {place: {"Where": NUMBER}, "$schema": "urn:a:dialect", "$id": "http://a/b"}
    assert called(server, nested | {place: {"Where": WHERE}}, other, choice=named)["where"] in range(10)


def test_a_definition_may_refer_to_itself_and_to_a_property(server):
    limb = {"type": "object", "properties": {"n": NUMBER, "next": {"$ref": "#/definitions/Limb"}}, "required": ["n"]}
    tree = {
        "properties": {"limb": {"$ref": "#/definitions/Limb"}, "n": {"$ref": "#/definitions/Limb/properties/n"}},
        "definitions": {"Limb": limb}, "required": ["n"],
    }  # fmt: skip
    assert called(server, tree)["n"] in range(10)


@pytest.mark.parametrize("parameters", [None, True, {"type": "string"}, {"type": ["object", "null"]}])
def test_arguments_are_an_object_whatever_the_schema_says(server, parameters):
    assert isinstance(called(server, parameters), dict)


@pytest.mark.parametrize(
    "odd",
    [
        {"type": "array", "items": {"enum": ["a"]}, "uniqueItems": True, "maxItems": 1},
        {"type": "object", "propertyNames": {"pattern": "^a"}, "additionalProperties": {"enum": [1]}},
        {"not": {"type": "string"}, "enum": [1, 2]},
        {"type": "string", "format": "colour", "maxLength": 2},
        {"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]},
        {"type": "string", "pattern": "^(?=a)b$", "maxLength": 2},
        {"type": "string", "pattern": "((", "maxLength": 2},
        {"type": "any", "enum": [1]},
        {"enum": []},
        {"type": "integer", "minimum": 5, "maximum": 1},
        {"$ref": "#/nowhere"},
        {"$ref": "http://example.com/a.json"},
        {"type": "object", "properties": {}, "required": ["b"], "additionalProperties": False},
        {"type": "object", "properties": []},
        {"if": {"const": 1}, "then": {"const": 1}, "enum": [1]},
        "a description",
        True,
    ],
    ids=str,
)
def test_a_keyword_that_no_grammar_follows_leaves_the_rest_of_its_tool_bound(server, odd):
    parameters = {"type": "object", "properties": {"town": WHERE["properties"]["town"], "odd": odd}}
    assert called(server, parameters | {"required": ["town"]})["town"] in ("Rome", "Oslo")


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_schema_that_is_too_much_for_a_grammar_is_loosened_as_a_whole(choice):
    one = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    many = {"anyOf": [{**one, "properties": {f"k{i}": one}, "required": [f"k{i}"]} for i in range(900)]}
    brief = byte_tokenizer("{% if tools %}tools{% endif %}<user>{{ messages[0]['content'] }}<assistant>")
    with contextlib.closing(Running(make_service(byte_model(), brief, slots=1, context=300))) as server:
        tools = [{"type": "function", "function": {"name": "many", "parameters": many}}]
        body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 200, "tools": tools, "seed": 1}
        assert server.http("/v1/chat/completions", body | {"tool_choice": choice})[0] == 200


def test_what_is_left_out_is_said_once(server, caplog):
    parameters = {"type": "object", "properties": {"a": {"type": "array", "minContains": 1, "maxItems": 0}}}
    for _ in range(2):
        called(server, parameters)
    assert sum("minContains" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object", "schema": WHERE},
        {"type": "json_schema", "schema": WHERE},
        {"type": "json_schema", "json_schema": {"name": "w", "schema": WHERE}},
    ],
)
def test_an_answers_schema_is_followed_with_a_wrapper_or_without(server, form):
    body = {"messages": [{"role": "user", "content": "?"}], "response_format": form, "max_tokens": 200, "seed": 3}
    status, answer = server.http("/v1/chat/completions", body)
    assert status == 200
    assert json.loads(json.loads(answer)["choices"][0]["message"]["content"])["town"] in ("Rome", "Oslo")
    form = json.loads(json.dumps(form).replace('"enum"', '"uniqueItems": true, "enum"'))
    assert server.http("/v1/chat/completions", body | {"response_format": form})[0] == 400
