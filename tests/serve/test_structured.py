"""Text that is bound to a grammar is of the grammar, whatever the model and the method; and tools are called by it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("llguidance")
pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")

from transformers import LogitsProcessorList

from longdraft import Request, Speculator
from longdraft.engine.grammar import fitted
from longdraft.engine.sampler import Sampler
from longdraft.engine.sequence import Sequence
from longdraft.errors import CapabilityError
from longdraft.serve import structured, tools
from longdraft.serve.schema import Message
from longdraft.trees.tree import union
from tests.serve.bytes import byte_model, byte_tokenizer
from tests.support.tiny import tiny_tokenizer

# ruff: noqa: E402
MODEL, TOKENIZER = byte_model(), byte_tokenizer()
WORDS = st.sampled_from(["a", "b", "cd", "e f"])
SCHEMAS = st.recursive(
    st.one_of(
        st.just({"type": "boolean"}),
        st.builds(lambda a: {"type": "integer", "minimum": 0, "maximum": a}, st.integers(1, 500)),
        st.builds(lambda w: {"enum": w}, st.lists(WORDS, min_size=1, max_size=3, unique=True)),
        st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(1, 6)),
    ),
    lambda inner: st.one_of(
        st.builds(
            lambda p: {"type": "object", "properties": p, "required": list(p), "additionalProperties": False},
            st.dictionaries(WORDS, inner, min_size=1, max_size=3),
        ),
        st.builds(lambda x: {"type": "array", "items": x, "maxItems": 2}, inner),
    ),
    max_leaves=4,
)


def fits(value, schema) -> bool:
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema["type"]
    if kind == "object":
        return value.keys() == schema["properties"].keys() and all(
            fits(value[k], s) for k, s in schema["properties"].items()
        )
    if kind == "array":
        return isinstance(value, list) and len(value) <= 2 and all(fits(x, schema["items"]) for x in value)
    if kind == "integer":
        return type(value) is int and 0 <= value <= schema["maximum"]
    return (
        isinstance(value, bool) if kind == "boolean" else isinstance(value, str) and len(value) <= schema["maxLength"]
    )


def decoded(grammar: str, *seeds: int, method: str = "ar", n: int = 600, ahead: bool = True, temperature: float = 1.0):
    """An answer for each seed, decoded together. ``ahead``: longdraft may ask what the grammar forces."""
    prompt = TOKENIZER("say it")["input_ids"]

    def request(seed: int) -> Request:
        constraint = structured.Constraint(TOKENIZER, grammar, len(prompt))
        processor = constraint if ahead else lambda ids, scores: constraint(ids, scores)
        return Request(prompt, max_new_tokens=n, temperature=temperature, seed=seed, processors=[processor])

    return Speculator(method, MODEL, TOKENIZER, plan="fixed").generate([request(seed) for seed in seeds])


@settings(max_examples=10)
@given(schema=SCHEMAS, seed=st.integers(0, 99))
def test_text_is_json_of_the_schema(schema, seed):
    (result,) = decoded(structured.json_grammar(schema), seed)
    assert result.finish_reason == "eos"
    assert fits(json.loads(result.text), schema)


PERSON = {
    "type": "object", "required": ["first name", "age"], "additionalProperties": False,
    "properties": {"first name": {"enum": ["Ada", "Alan", "Bo"]}, "age": {"type": "integer", "maximum": 99}},
}  # fmt: skip


@pytest.mark.parametrize("method", ["prompt-lookup", "self"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_grammar_forces_is_drafted_and_changes_nothing(method, temperature):
    words = {"type": "array", "items": {"enum": ["alpha", "beta"]}, "minItems": 2, "maxItems": 4}
    schema = {**PERSON, "properties": {**PERSON["properties"], "words": words}}
    grammar, seeds = structured.json_grammar(schema), (1, 2, 3)
    plain = decoded(grammar, *seeds, temperature=temperature)
    without = decoded(grammar, *seeds, method=method, temperature=temperature, ahead=False)
    drafted = decoded(grammar, *seeds, method=method, temperature=temperature)
    assert [r.token_ids for r in plain] == [r.token_ids for r in without] == [r.token_ids for r in drafted]
    assert 2 * sum(r.rounds for r in drafted) < sum(r.rounds for r in without)


def test_a_tree_is_fitted_to_its_grammar():
    """Keys and the end are forced, a number is drafted, and what is forbidden is dropped."""
    constraint = structured.Constraint(TOKENIZER, structured.json_grammar(PERSON), 0)
    text = TOKENIZER('{"first name":"B')["input_ids"]
    root = Sequence(0, [1], 100, sampler=Sampler(True, LogitsProcessorList([constraint])))
    root.output = text

    def fit(*drafted: str, most: int = 40) -> tuple[str, str]:
        """The drafted tokens of the fitted tree, and those of them that are forced."""
        paths = [TOKENIZER(path)["input_ids"] for path in drafted]
        tree = fitted(union(text[-1], paths), root, most)
        assert constraint.forced() == TOKENIZER('o","age":')["input_ids"]  # it stands where it stood
        forced = [token for i, token in enumerate(tree.tokens) if i in tree.forced]
        return TOKENIZER.decode(tree.tokens[1:]), TOKENIZER.decode(forced)

    assert not constraint.follow(len(TOKENIZER) + 1)  # a model's vocabulary has more than its tokenizer's
    assert fit("") == ('o","age":', 'o","age":')
    assert fit("", most=3) == ('o",', 'o",')
    assert fit('o","age":12', "ugs") == ('o","age":12}<eos>', 'o","age":}<eos>')  # two digits are the most
    assert fit('o","age":1,', most=11) == ('o","age":1', 'o","age":')


def test_objects_have_the_properties_that_their_schema_lists():
    inner = {"type": "object", "properties": {"properties": {"type": "string"}}}
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/I"}, "b": {"items": inner}},
        "$defs": {"I": inner},
    }
    found = structured.closed(schema)
    for each in (found, found["$defs"]["I"], found["properties"]["b"]["items"]):
        assert each["additionalProperties"] is False
    assert found["properties"]["a"] == {"$ref": "#/$defs/I"} and "additionalProperties" not in inner
    for left in ({"type": "object"}, inner | {"additionalProperties": True}, {"allOf": [inner]}):
        assert structured.closed(left) == left


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
    """Content, parts of tool calls and the reason to finish."""
    parser = tools.ToolParser(names)
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    rest, reason = parser.finish()
    deltas += rest
    content = "".join(delta.get("content", "") for delta in deltas)
    return content, [part for delta in deltas for part in delta.get("tool_calls", [])], reason


def test_a_template_without_tools_gets_them_in_words():
    asked = [{"role": "user", "content": "?"}]
    written, template = tools.with_tools(TOKENIZER, asked, [WEATHER])
    assert template == {} and written[1:] == asked
    assert written[0]["role"] == "system" and "weather" in written[0]["content"]
    history = [
        {"role": "assistant", "content": "",
         "tool_calls": [{"id": "1", "type": "function", "function": {"name": "time", "arguments": {"zone": "CET"}}}]},
        {"role": "tool", "content": "12:00", "tool_call_id": "1"},
    ]  # fmt: skip
    written, _ = tools.with_tools(TOKENIZER, history, [])
    assert written[0]["content"] == '<tool_call>{"name": "time", "arguments": {"zone": "CET"}}</tool_call>'
    assert written[1] == {"role": "user", "content": "<tool_response>12:00</tool_response>"}
    knows = byte_tokenizer("{% if tools %}{{ tools }}{% endif %}{% for m in messages %}{{ m['content'] }}{% endfor %}")
    assert tools.with_tools(knows, asked, [WEATHER]) == (asked, {"tools": [WEATHER]})


def test_templates_get_arguments_as_objects_since_they_write_the_json_themselves():
    def arguments(text):
        call = {"id": "1", "function": {"name": "time", "arguments": text}}
        plain = Message(role="assistant", tool_calls=[call]).plain()
        return plain["tool_calls"][0]["function"]["arguments"]

    assert arguments('{"zone": "CET"}') == {"zone": "CET"} and arguments("") == {}
    assert arguments("{broken") == "{broken"
