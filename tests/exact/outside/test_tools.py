"""Tools: a model's text is its own until its call begins, and what can be followed of a client's schema is followed."""

from __future__ import annotations

import contextlib
import json

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

from longdraft.serve.service import Service
from tests.serve.bytes import byte_model, byte_tokenizer
from tests.serve.conftest import Running, make_service

MODEL, TOKENIZER = byte_model(), byte_tokenizer()
WEATHER = {
    "type": "object", "properties": {"place": {"enum": ["Rome", "Oslo"]}}, "required": ["place"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
         {"type": "function", "function": {"name": "time"}}]  # fmt: skip


class Leading:
    """A logits processor that makes the model prefer a text, where nothing forbids it."""

    def __init__(self, tokenizer, prompt: int, text: str) -> None:
        self._prompt, self._wanted = prompt, [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]

    def __call__(self, input_ids, scores):
        at = input_ids.shape[1] - self._prompt
        if at < len(self._wanted):
            scores = scores.clone()
            scores[0, self._wanted[at]] += 1000
        return scores


class LedService(Service):
    """Its model says what a request's ``user`` field says."""

    def make_choices(self, prompt, body, *arguments, **options):
        choices = super().make_choices(prompt, body, *arguments, **options)
        for choice in choices if body.user else ():
            lead = lambda: Leading(self.tokenizer, len(prompt), body.user)  # noqa: E731
            choice.processor_factories = [lead, *choice.processor_factories]
        return choices


@pytest.fixture(scope="module")
def server():
    service = make_service(MODEL, TOKENIZER, slots=2, context=1200)
    service.__class__ = LedService
    with contextlib.closing(Running(service)) as running:
        yield running


def said(server, text, stream=False, method="prompt-lookup", **fields):
    """Content, calls (name and arguments) and finish reason of an answer of a model that wants to say a text."""
    body = {"messages": [{"role": "user", "content": "?"}], "tools": TOOLS, "temperature": 0, "user": text,
            "max_tokens": 300, "stream": stream, "method": method}  # fmt: skip
    status, answer = server.http("/v1/chat/completions", body | fields)
    assert status == 200, answer
    if not stream:
        (choice,) = json.loads(answer)["choices"]
        message = choice["message"]
        calls = [tuple(call["function"].values()) for call in message.get("tool_calls", ())]
        return message["content"] or "", calls, choice["finish_reason"]
    content, found, reason = "", {}, None
    for line in answer.decode().splitlines():
        if not line.startswith("data: {"):
            continue
        (choice,) = json.loads(line[6:])["choices"]
        content += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            one = found.setdefault(call["index"], ["", ""])
            one[0] += call["function"].get("name", "")
            one[1] += call["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return content, [tuple(call) for call in found.values()], reason


ROME, NOW = ("weather", '{"place": "Rome"}'), ("time", "{}")
IN_ROME, THE_TIME = '{"name": "weather", "arguments": {"place": "Rome"}}', '{"name": "time", "arguments": {}}'
TAGGED = f"<tool_call>\n{IN_ROME}\n</tool_call>"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "<html><body>&lt;</body></html>", "<tool", "</tool_call>", "<tools>\n  \n <b>", '{"name": "nobody"}',
        "```html\n<p>\n```", '```json\n{"a": [1, 2]}\n```\n', '[{"name": "wea', "\n\n",
    ],
)  # fmt: skip
def test_text_is_the_models_own_to_the_bit_whatever_it_looks_like(server, text, stream):
    assert said(server, text, stream) == (text, [], "stop")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (TAGGED, "", [ROME]),
        (f"\n{TAGGED}\n<tool_call>{THE_TIME}</tool_call>\n", "", [ROME, NOW]),
        (f"<b>Wait.</b>\n\n{TAGGED}", "<b>Wait.</b>\n\n", [ROME]),
        (IN_ROME, "", [ROME]),
        (f"{{{IN_ROME}}}", "", [ROME]),
        (f"```json\n{IN_ROME}\n```", "", [ROME]),
        (f"Both:\n```json\n{IN_ROME}\n{THE_TIME}\n```", "Both:\n", [ROME, NOW]),
        (f"[{IN_ROME}, {THE_TIME}]", "", [ROME, NOW]),
        (f"{IN_ROME}\nSo far.", "So far.", [ROME]),
        (f"{TAGGED}<p>", "<p>", [ROME]),
        ('<tool_call>{"name": "time", "arguments": {"a": "</tool_call>}"}}</tool_call>', "",
         [("time", '{"a": "</tool_call>}"}')]),
    ],
)  # fmt: skip
def test_calls_are_told_from_the_text_before_between_and_behind(server, text, content, calls, stream):
    assert said(server, text, stream) == (content, calls, "tool_calls")


@pytest.mark.parametrize("begun", ['<tool_call>\n{"name": "weather", "arg', '{"name": "weather", "arguments": {"pl'])
def test_a_call_is_bound_from_where_it_begins(server, begun):
    wrong = begun + 'nonsense that no call has, on and on">'
    _, calls, reason = said(server, wrong, max_tokens=400)
    assert reason == "tool_calls" and json.loads(calls[0][1])["place"] in ("Rome", "Oslo")


@pytest.mark.parametrize("text", [TAGGED, f"```\n{IN_ROME}"])
def test_a_call_that_is_cut_at_the_limit_is_no_content(server, text):
    begins = max(text.find("<tool_call>") + 11, text.find('"weather"') + 9 if "<tool" not in text else 0)
    for tokens in range(begins, len(text) - 1, 11):
        content, _, reason = said(server, text, max_tokens=tokens)
        assert content == "" and reason in ("length", "tool_calls")


def test_tags_that_are_tokens_of_the_model_begin_and_end_a_call():
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    service = make_service(MODEL, tokenizer, slots=1, context=1200)
    service.__class__ = LedService
    with contextlib.closing(Running(service)) as server:
        assert said(server, f"<p>{TAGGED}\n<tool_call>{THE_TIME}</tool_call>") == ("<p>", [ROME, NOW], "tool_calls")
        _, calls, _ = said(server, '<tool_call>{"name": "weather", "arg, wrong and wrong', max_tokens=400)
        assert json.loads(calls[0][1])["place"] in ("Rome", "Oslo")


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_a_limit_or_a_stop_cuts_is_no_content(server, stream):
    tight_rome = ("weather", '{"place":"Rome"}')
    tight = f'<tool_call>{{"name":"weather","arguments":{tight_rome[1]}}}</tool_call>'
    for text, fields, content, calls, reason in (
        ("Hi " + TAGGED, {"max_tokens": 9}, "Hi ", [], "length"),
        ("Hi <ta", {"max_tokens": 6}, "Hi <ta", [], "length"),  # may be any tag
        (TAGGED * 2, {"max_tokens": len(TAGGED) + 6}, "", [ROME], "length"),
        (tight * 2, {"max_tokens": len(tight) + 2, "tool_choice": "required"}, "", [tight_rome], "length"),
        (TAGGED, {"max_tokens": 3, "tool_choice": "required"}, "", [], "length"),
        (TAGGED, {"stop": "\n"}, "", [], "stop"),
        ("Hi " + TAGGED, {"stop": ["<tool_call>"]}, "Hi ", [], "stop"),
        ("Hi " + TAGGED, {"stop": "</tool"}, "Hi ", [ROME], "tool_calls"),
        (TAGGED * 2 + "more", {"parallel_tool_calls": False}, "", [ROME], "tool_calls"),
    ):
        assert said(server, text, stream, **fields) == (content, calls, reason), (text, fields)


def test_free_text_with_tools_is_that_without_them_and_calls_are_drafted(server):
    """Where the model's own text is no call; and the bound part is drafted, accepted and the same as plain decoding."""
    again = "the whale and the ship, the whale and the ship, the whale <and> the ship. " * 2
    status, answer = server.http("/v1/chat/completions", {
        "messages": [{"role": "user", "content": again}], "user": again + TAGGED, "tools": TOOLS, "temperature": 0,
        "max_tokens": 300,
    })  # fmt: skip
    assert status == 200
    counts = json.loads(answer)["usage"]["speculation"]
    assert counts["num_draft_tokens"] > counts["num_accepted_tokens"] > 0
    assert said(server, again + TAGGED, method="ar") == (again, [ROME], "tool_calls")
    assert json.loads(answer)["choices"][0]["message"]["content"] == again


# --- schemas as clients send them: none turns a request away ---

WHERE = {"type": "object", "properties": {"town": {"enum": ["Rome", "Oslo"]}}, "required": ["town"]}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 9}


def called(server, *parameters, choice="required"):
    """The arguments of the call that comes when functions with these parameters are offered."""
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": p}} for i, p in enumerate(parameters)]
    body = {"messages": [{"role": "user", "content": "?"}], "tools": tools, "tool_choice": choice, "max_tokens": 400,
            "parallel_tool_calls": False, "seed": 3}  # fmt: skip
    status, answer = server.http("/v1/chat/completions", body)
    assert status == 200, answer
    (call,) = json.loads(answer)["choices"][0]["message"]["tool_calls"]
    return json.loads(call["function"]["arguments"])


def test_references_lead_to_the_tools_own_definitions(server):
    for place in ("$defs", "definitions"):
        nested = {"type": "object", "properties": {"where": {"$ref": f"#/{place}/Where"}}, "required": ["where"]}
        assert called(server, nested | {place: {"Where": WHERE}})["where"]["town"] in ("Rome", "Oslo")
        # The other tool has something else under that name.
        named = {"type": "function", "function": {"name": "f1"}}
        other = nested | {place: {"Where": NUMBER}, "$schema": "urn:a:dialect", "$id": "http://a/b"}
        assert called(server, nested | {place: {"Where": WHERE}}, other, choice=named)["where"] in range(10)
    # A definition may refer to itself and to a property.
    limb = {"type": "object", "properties": {"n": NUMBER, "next": {"$ref": "#/definitions/Limb"}}, "required": ["n"]}
    tree = {
        "properties": {"limb": {"$ref": "#/definitions/Limb"}, "n": {"$ref": "#/definitions/Limb/properties/n"}},
        "definitions": {"Limb": limb}, "required": ["n"],
    }  # fmt: skip
    assert called(server, tree)["n"] in range(10)


def test_arguments_are_an_object_whatever_the_schema_says(server):
    for parameters in (None, True, {"type": "string"}, {"type": ["object", "null"]}):
        assert isinstance(called(server, parameters), dict)


ODD = [
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
]


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_a_keyword_that_no_grammar_follows_leaves_the_rest_of_its_tool_bound(server, odd):
    parameters = {"type": "object", "properties": {"town": WHERE["properties"]["town"], "odd": odd}}
    assert called(server, parameters | {"required": ["town"]})["town"] in ("Rome", "Oslo")


@pytest.mark.parametrize("choice", ["required", pytest.param("auto", marks=pytest.mark.slow)])
def test_a_schema_that_is_too_much_for_a_grammar_is_loosened_as_a_whole(choice):
    one = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    many = {"anyOf": [{**one, "properties": {f"k{i}": one}, "required": [f"k{i}"]} for i in range(900)]}
    brief = byte_tokenizer("{% if tools %}tools{% endif %}<user>{{ messages[0]['content'] }}<assistant>")
    with contextlib.closing(Running(make_service(MODEL, brief, slots=1, context=300))) as server:
        tools = [{"type": "function", "function": {"name": "many", "parameters": many}}]
        body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 200, "tools": tools, "seed": 1}
        assert server.http("/v1/chat/completions", body | {"tool_choice": choice})[0] == 200


def test_an_answers_schema_is_followed_with_a_wrapper_or_without(server):
    for form in (
        {"type": "json_object", "schema": WHERE},
        {"type": "json_schema", "schema": WHERE},
        {"type": "json_schema", "json_schema": {"name": "w", "schema": WHERE}},
    ):
        body = {"messages": [{"role": "user", "content": "?"}], "response_format": form, "max_tokens": 200, "seed": 3}
        status, answer = server.http("/v1/chat/completions", body)
        assert status == 200
        assert json.loads(json.loads(answer)["choices"][0]["message"]["content"])["town"] in ("Rome", "Oslo")
        form = json.loads(json.dumps(form).replace('"enum"', '"uniqueItems": true, "enum"'))
        assert server.http("/v1/chat/completions", body | {"response_format": form})[0] == 400
