"""Structured output follows its grammar with any model and method; tool calls do too."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("llguidance")
pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")

from longdraft import Request, Speculator
from longdraft.errors import CapabilityError
from longdraft.serve import structured, tools
from longdraft.serve.protocol import ChatMessage
from longdraft.serve.tool_parser import ToolParser
from tests.serve.bytes import byte_model, byte_tokenizer
from tests.support.tiny import tiny_tokenizer

# ruff: noqa: E402
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


def test_objects_have_the_properties_that_their_schema_lists():
    inner = {"type": "object", "properties": {"properties": {"type": "string"}}}
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/I"}, "b": {"items": inner}},
        "$defs": {"I": inner},
    }
    found = structured.close_objects(schema)
    for each in (found, found["$defs"]["I"], found["properties"]["b"]["items"]):
        assert each["additionalProperties"] is False
    assert found["properties"]["a"] == {"$ref": "#/$defs/I"} and "additionalProperties" not in inner
    for left in ({"type": "object"}, inner | {"additionalProperties": True}, {"allOf": [inner]}):
        assert structured.close_objects(left) == left


def test_a_tokenizer_without_a_grammar_is_refused():
    with pytest.raises(CapabilityError):
        structured.Constraint(tiny_tokenizer(eos=True), structured.json_grammar({"type": "object"}), 1)


# --- tools ---

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather", "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"place": {"enum": ["Rome", "Oslo"]}}, "required": ["place"],
                       "additionalProperties": False},
    },
}  # fmt: skip


@settings(max_examples=30)
@given(cuts=st.lists(st.integers(1, 12), max_size=30))
def test_calls_are_separated_from_text_however_it_is_cut(cuts):
    call = '{"name": "weather", "arguments": {"place": "Rome"}}'
    text = f'well <tool <tool_call>{call}</tool_call><tool_call>{{"name": "time", "arguments": {{}}}}</tool_call> so'
    pieces, at = [], 0
    for cut in [*cuts, len(text)]:
        pieces.append(text[at : at + cut])
        at += cut
    content, parts, reason = parsed(pieces)
    assert content == "well <tool  so" and reason == "tool_calls"
    calls = {}
    for part in parts:
        name, arguments = calls.get(part["index"], ("", ""))
        name += part["function"].get("name", "")
        calls[part["index"]] = name, arguments + part["function"]["arguments"]
    expected = [("weather", {"place": "Rome"}), ("time", {})]
    assert [(name, json.loads(arguments)) for name, arguments in calls.values()] == expected
    assert len({part["id"] for part in parts if "id" in part}) == 2


def parsed(pieces, names=()):
    """Content, deltas of tool calls and the finish reason."""
    parser = ToolParser(names)
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    rest, reason = parser.finish()
    deltas += rest
    content = "".join(delta.get("content", "") for delta in deltas)
    return content, [part for delta in deltas for part in delta.get("tool_calls", [])], reason


def test_a_template_without_tools_gets_them_in_words():
    asked = [{"role": "user", "content": "?"}]
    written, template = tools.messages_with_tools(TOKENIZER, asked, [WEATHER])
    assert template == {} and written[1:] == asked
    assert written[0]["role"] == "system" and "weather" in written[0]["content"]
    history = [
        {"role": "assistant", "content": "",
         "tool_calls": [{"id": "1", "type": "function", "function": {"name": "time", "arguments": {"zone": "CET"}}}]},
        {"role": "tool", "content": "12:00", "tool_call_id": "1"},
    ]  # fmt: skip
    written, _ = tools.messages_with_tools(TOKENIZER, history, [])
    assert written[0]["content"] == '<tool_call>{"name": "time", "arguments": {"zone": "CET"}}</tool_call>'
    assert written[1] == {"role": "user", "content": "<tool_response>12:00</tool_response>"}
    knows = byte_tokenizer("{% if tools %}{{ tools }}{% endif %}{% for m in messages %}{{ m['content'] }}{% endfor %}")
    assert tools.messages_with_tools(knows, asked, [WEATHER]) == (asked, {"tools": [WEATHER]})


def test_templates_get_arguments_as_objects_since_they_write_the_json_themselves():
    def arguments(text):
        call = {"id": "1", "function": {"name": "time", "arguments": text}}
        plain = ChatMessage(role="assistant", tool_calls=[call]).for_template()
        return plain["tool_calls"][0]["function"]["arguments"]

    assert arguments('{"zone": "CET"}') == {"zone": "CET"} and arguments("") == {}
    assert arguments("{broken") == "{broken"
