"""What coding agents and their SDKs send: tools with a format, tools of other types, fields of no meaning here, and a
history that has grown too long."""

from __future__ import annotations

import contextlib
import json

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")

from tests.exact.outside.test_server_requests import ASKED, CHAT, FLAT, RESPONSES, ask, led, prompt
from tests.exact.outside.test_tools import IN_ROME, ROME, TAGGED, TOOLS, said
from tests.serve.conftest import Running


@pytest.fixture(scope="module")
def server():
    with contextlib.closing(Running(led())) as running:
        yield running


# --- tools with a format ---

ANSWER = {"type": "object", "properties": {"answer": {"enum": ["It rains.", "It does not <tool_call>"]}},
          "required": ["answer"], "additionalProperties": False}  # fmt: skip
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER, "strict": True}}
ANY = {"type": "json_object"}
RAINS, NOT = '{"answer":"It rains."}', '{"answer":"It does not <tool_call>"}'
TIGHT = '<tool_call>{"name":"weather","arguments":{"place":"Rome"}}</tool_call>'
AGAIN = f"{IN_ROME}\n{IN_ROME}"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "fields", "content", "calls", "reason"),
    [
        (RAINS, {}, RAINS, [], "stop"),
        ("It rains, I think.", {}, None, [], "stop"),  # what would be text has the schema
        (TAGGED, {}, "", [ROME], "tool_calls"),
        (IN_ROME, {}, "", [ROME], "tool_calls"),
        (AGAIN, {}, "", [ROME, ROME], "tool_calls"),
        (AGAIN, {"parallel_tool_calls": False}, "", [ROME], "tool_calls"),
        (TAGGED, {"tool_choice": "none"}, None, [], "stop"),
        (TIGHT, {"tool_choice": "required", "parallel_tool_calls": False}, "", None, "tool_calls"),
        (RAINS, {"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "", None, "tool_calls"),
        (IN_ROME.replace("Rome", "Paris"), {"response_format": ANY}, "", None, "tool_calls"),
        (RAINS, {"response_format": {"type": "text"}}, RAINS, [], "stop"),
    ],
)
def test_calls_are_free_until_the_answer_which_has_the_schema(server, text, fields, content, calls, reason, stream):
    fields = {"response_format": FORM} | fields
    found = said(server, text, stream, **fields)
    assert found == said(server, text, stream, method="ar", **fields)
    if content is None:
        assert json.loads(found[0])["answer"] in ANSWER["properties"]["answer"]["enum"]
    else:
        assert found[0] == content
    for name, arguments in found[1] if calls is None else ():
        assert name == "time" or json.loads(arguments)["place"] in ("Rome", "Oslo")
    assert calls is None or found[1] == calls
    assert found[2] == reason


def test_what_a_format_forces_is_drafted_beside_tools(server):
    body = {"tools": TOOLS, "response_format": FORM, "user": NOT, "max_tokens": 100}
    drafted, plain = (ask(server, method=method, **body)[1] for method in ("prompt-lookup", "ar"))
    assert drafted["choices"] == plain["choices"]
    counts = drafted["usage"]["speculation"]
    assert counts["num_draft_tokens"] > counts["num_accepted_tokens"] > 10


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_calls_or_a_format(server, stream):
    form = {"format": {"type": "json_schema", "name": "a", "schema": ANSWER}}

    def items(text):
        body = {"input": "?", "tools": FLAT, "text": form, "user": text, "temperature": 0, "stream": stream}
        status, answer = server.http(RESPONSES, body)
        assert status == 200
        lines = [line[6:] for line in answer.decode().splitlines() if line.startswith("data: {")] or [answer]
        return json.loads(lines[-1]).get("response", json.loads(lines[-1]))["output"]

    (call,) = items(TAGGED)
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", *ROME)
    (message,) = items(RAINS)
    assert message["content"][0]["text"] == RAINS


def test_thoughts_that_the_prompt_opens_are_free_and_what_follows_is_bound(server):
    body = {"chat_template_kwargs": {"opened": True}, "response_format": FORM, "max_tokens": 200}
    for fields in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "required"}):
        answer = ask(server, user="{ Hm. <tool_call> }</think>\n\nWell.", **body, **fields)[1]
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"] == "{ Hm. <tool_call> }"
        if "tool_choice" in fields:
            assert message["tool_calls"]
        else:
            assert json.loads(message["content"])["answer"] in ANSWER["properties"]["answer"]["enum"]


def test_items_of_earlier_responses_are_known_by_their_ids(server):
    """As the AI SDK sends them unless it is told not to."""
    create, turns = server.client().responses.create, [{"role": "user", "content": "?"}]
    first = create(model="tiny", input=turns, tools=FLAT, user=f"<think>\nhm\n</think>\n\nWait.{TAGGED}", temperature=0)
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "12"}
    whole = [*turns, *(item.model_dump() for item in first.output), result]
    referred = [*turns, *({"type": "item_reference", "id": item.id} for item in first.output), result]
    ends = [create(model="tiny", input=each, tools=FLAT, user="It rains.", temperature=0) for each in (whole, referred)]
    assert ends[0].output_text == ends[1].output_text and ends[0].usage.input_tokens == ends[1].usage.input_tokens
    unstored = create(model="tiny", input=turns, user="Hm.", temperature=0, store=False)
    for name in (unstored.output[0].id, "msg_1"):
        status, found = ask(server, RESPONSES, input=[*turns, {"type": "item_reference", "id": name}])
        assert status == 404 and name in found["error"]["message"] and "store: false" in found["error"]["message"]


# --- tools of other types ---

PATCH = {"type": "custom", "name": "apply_patch", "description": "Patches.",
         "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}}  # fmt: skip
SHELL = {"type": "local_shell"}
OTHERS = [{"type": "web_search_preview", "external_web_access": False}, {"type": "file_search", "vector_store_ids": []},
          {"type": "image_generation"}, {"type": "namespace", "name": "mcp", "tools": FLAT},
          {"type": "mcp", "server_label": "a"}]  # fmt: skip
PATCHED = '<tool_call>{"name": "apply_patch", "arguments": {"input": "*** Begin\\n+\\"é\\""}}</tool_call>'
LISTED = '<tool_call>{"name": "local_shell", "arguments": {"command": ["ls", "-l"]}}</tool_call>'


def test_tools_that_are_not_served_are_left_out_and_the_log_says_so(server, caplog):
    for path, tools in ((RESPONSES, FLAT), (CHAT, TOOLS)):
        given = {"input": "?"} if path == RESPONSES else {}
        status, found = ask(server, path, tools=[*OTHERS, *tools], user=TAGGED, **given)
        assert status == 200 and "weather" in json.dumps(found)
    assert all(any(repr(tool["type"]) in each.getMessage() for each in caplog.records) for tool in OTHERS)


def test_custom_tools_and_a_local_shell_are_called_and_read_back_as_what_they_are(server):
    create, tools = server.client().responses.create, [PATCH, SHELL, *FLAT]
    turns = [{"role": "user", "content": "?"}]
    patch, shell = create(model="tiny", input=turns, tools=tools, user=f"{PATCHED}{LISTED}", temperature=0).output
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "apply_patch", '*** Begin\n+"é"')
    assert (shell.type, shell.action.type, shell.action.command) == ("local_shell_call", "exec", ["ls", "-l"])
    events = list(create(model="tiny", input=turns, tools=tools, user=PATCHED, temperature=0, stream=True))
    assert "".join(e.delta for e in events if e.type == "response.custom_tool_call_input.delta") == patch.input
    assert [e.input for e in events if e.type == "response.custom_tool_call_input.done"] == [patch.input]
    assert [e.item.input for e in events if e.type == "response.output_item.done"] == [patch.input]
    patched = {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "Patched."}
    listed = {"type": "local_shell_call_output", "id": shell.call_id, "output": "a.py"}
    turns += [patch.model_dump(), patched, shell.model_dump(), listed]
    assert create(model="tiny", input=turns, tools=tools, user="Done.", temperature=0).output_text == "Done."


def test_a_custom_tool_of_a_chat_is_called_as_one(server):
    custom = [{"type": "custom", "custom": {"name": "apply_patch"}}]
    for choice in ("auto", {"type": "custom", "custom": {"name": "apply_patch"}}):
        message = ask(server, tools=custom, tool_choice=choice, user=PATCHED)[1]["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert (call["type"], call["custom"]["name"]) == ("custom", "apply_patch")
    history = [*ASKED, message, {"role": "tool", "tool_call_id": call["id"], "content": "Patched."}, *ASKED]
    assert "Patched." in prompt(server, messages=history)


ALLOWED = {"type": "allowed_tools", "mode": "required"}


@pytest.mark.parametrize(
    ("path", "choice", "name"),
    [
        (RESPONSES, {"type": "function", "name": "time"}, "time"),
        (RESPONSES, ALLOWED | {"tools": [{"type": "function", "name": "time"}]}, "time"),
        (RESPONSES, ALLOWED | {"tools": [SHELL, {"type": "mcp"}]}, None),
        (CHAT, {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOLS[1]]}}, "time"),
        (CHAT, {"type": "required"}, "weather"),
        (CHAT, {"type": "auto"}, "weather"),
    ],
)
def test_a_choice_may_be_an_object(server, path, choice, name):
    tools = [*FLAT, SHELL] if path == RESPONSES else TOOLS
    given = {"input": "?"} if path == RESPONSES else {}
    status, found = ask(server, path, tools=tools, tool_choice=choice, user=TIGHT, **given)
    assert status == 200
    message = found["output"] if path == RESPONSES else found["choices"][0]["message"]["tool_calls"]
    calls = [call.get("function", call) for call in message]
    assert calls and {call.get("name") for call in calls} <= {name}


# --- fields ---

HARMLESS = {
    "store": True, "service_tier": "priority", "prompt_cache_key": "a", "safety_identifier": "b", "verbosity": "low",
    "metadata": {"a": "b"}, "prediction": {"type": "content", "content": "x"}, "web_search_options": {},
    "stream_options": {"include_obfuscation": False, "more": 1}, "client_metadata": {"x": "1"}, "of_next_year": [1],
    "top_logprobs": 0, "audio": None, "functions": [], "skip_special_tokens": True, "max_tool_calls": 3,
    "include": ["a"], "context_management": [{"type": "compaction"}], "truncation": "auto",
}  # fmt: skip


def test_fields_that_change_nothing_are_not_looked_at(server):
    expected = ask(server, user="yes")[1]["choices"][0]["message"]["content"]
    for fields in (HARMLESS | {"modalities": ["text"], "best_of": 1}, {}):
        said = {
            "role": "assistant", "content": "a", "refusal": None, "audio": None, "function_call": None, "phase": "x",
            "annotations": [], "reasoning_content": "hm", "reasoning_details": [{}],
        }  # fmt: skip
        function = {"name": "f", "arguments": "{}", "parsed_arguments": {}, "more": 1}
        call = {"id": "1", "type": "function", "index": 0, "extra": {}, "function": function}
        called = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "x", "id": "2"}]}
        status, found = ask(server, messages=[*ASKED, said, *ASKED, called, result], user="yes", **fields)
        assert status == 200 and found["choices"][0]["message"]["content"] == expected
    more = HARMLESS | {"text": {"verbosity": "low"}, "reasoning": {"effort": "low", "summary": "auto", "context": "x"},
                       "max_output_tokens": 20}  # fmt: skip
    turns = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox."}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAAA"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "tool_search_call", "call_id": "2", "execution": "client", "arguments": {}},
        {"type": "tool_search_output", "call_id": "2", "execution": "client", "tools": []},
        {"type": "mcp_list_tools", "server_label": "a", "tools": []},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "phase": "commentary",
         "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": [], "more": 1},
                     {"type": "refusal", "refusal": "No."}]},
        {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "f", "arguments": "{}", "namespace": "n"},
        {"type": "function_call_output", "call_id": "1", "output": "x", "status": "completed", "internal": {}},
        {"role": "user", "content": "?"},
    ]  # fmt: skip
    status, found = ask(server, RESPONSES, input=turns, user="yes", **more)
    assert status == 200 and found["output"][0]["content"][0]["text"] == "yes" and found["created_at"] > 1.7e9


def test_settings_of_chats_are_those_of_responses(server):
    chat = ask(server, logit_bias={"70": 9}, frequency_penalty=1, stop=["zz"], max_tokens=9)[1]
    body = {"input": "?", "logit_bias": {"70": 9}, "frequency_penalty": 1, "stop": ["zz"], "max_output_tokens": 9}
    found = ask(server, RESPONSES, **body)[1]
    assert found["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]


def test_an_image_in_a_tools_result_is_told_in_words(server):
    image = [{"type": "text", "text": "seen: "}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    call = {"id": "1", "function": {"name": "f", "arguments": {}}}
    history = [*ASKED, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": image}]
    shown = prompt(server, messages=history)
    assert "seen: " in shown and "image" in shown
    turns = [
        {"type": "function_call", "call_id": "1", "name": "f"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image", "image_url": "data:,"}]},
    ]
    assert ask(server, RESPONSES, input=turns, user="yes")[0] == 200


# --- lengths ---


def test_a_prompt_that_is_too_long_is_refused_in_openais_words(server):
    long = "a" * 1300
    for path, body, param in (
        (CHAT, {"messages": [{"role": "user", "content": long}], "max_tokens": 7}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": long}], "max_tokens": 7, "stream": True}, "messages"),
        ("/v1/completions", {"prompt": long, "max_tokens": 7}, "prompt"),
        (RESPONSES, {"input": long, "max_output_tokens": 7}, "input"),
    ):
        status, answer = ask(server, path, **body)
        error = answer["error"]
        assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "context_length_exceeded")
        assert error["param"] == param and "maximum context length is 1200 tokens" in error["message"]
        numbers = [int(word.strip("(")) for word in error["message"].split() if word.strip("(").isdigit()]
        assert numbers == [1200, numbers[2] + 7, numbers[2], 7] and numbers[2] >= 1300
    # A streamed response fails in the stream, as OpenAI's do: Codex looks for it there.
    events = list(server.client().responses.create(model="tiny", input=long, stream=True))
    assert [event.type for event in events] == ["response.created", "response.in_progress", "response.failed"]
    assert events[-1].response.error.code == "context_length_exceeded"


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_usage_of_several_prompts_is_their_sum(server, n, stream):
    body = {"temperature": 0, "max_tokens": 4, "n": n, "stream": stream, "ignore_eos": True}
    body |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}} if stream else {}

    def usage(of):
        answer = server.http("/v1/completions", body | {"prompt": of})[1].decode()
        lines = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
        assert all(line["usage"]["prompt_tokens"] == lines[-1]["usage"]["prompt_tokens"] for line in lines)
        return (lines or [json.loads(answer)])[-1]["usage"]

    texts = ["the whale and " * 9, "a ship " * 20]
    for text in texts:
        usage(text)
    apart, together = [usage(text) for text in texts], usage(texts)
    assert together["prompt_tokens"] == sum(each["prompt_tokens"] for each in apart)
    assert together["completion_tokens"] == 8 * n
    details = [each["prompt_tokens_details"]["cached_tokens"] for each in (together, *apart)]
    assert details[0] == sum(details[1:]) > 0
