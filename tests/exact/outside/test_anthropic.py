"""Anthropic's Messages API says what a chat says: the same prompts, texts, calls, thoughts, ends and counts."""

from __future__ import annotations

import contextlib
import http.client
import json
from dataclasses import replace

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")

from tests.exact.outside.test_server_requests import ASKED, CHAT, TOKENIZER, led
from tests.exact.outside.test_tools import IN_ROME, TAGGED, THE_TIME, TOOLS, WEATHER, LedService
from tests.serve.conftest import Running
from tests.serve.over_http import http as over_http

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
OURS = [{"name": "weather", "input_schema": WEATHER}, {"name": "time", "input_schema": {"type": "object"}}]
THEIRS = [TOOLS[0], {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}]
FORM = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"enum": [3]}}, "required": ["a"]}}
THOUGHT = f"<think>\nhm\n</think>\n\nWait.{TAGGED}\n<tool_call>{THE_TIME}</tool_call>"


class Told(LedService):
    """Keeps the prompt of the last request."""

    def make_choices(self, prompt, body, *arguments, **options):
        self.prompt = TOKENIZER.decode(prompt)
        return super().make_choices(prompt, body, *arguments, **options)


def running(**settings):
    service = led(**settings)
    service.__class__ = Told
    return contextlib.closing(Running(service))


@pytest.fixture(scope="module")
def server():
    with running() as server:
        yield server


def ask(server, path=MESSAGES, **fields):
    usual = {"messages": ASKED, "temperature": 0} | ({} if path == COUNT else {"max_tokens": 300})
    status, answer = server.http(path, usual | fields)
    return status, json.loads(answer)


def events(server, **fields):
    """The names and contents of a stream's events."""
    body = {"messages": ASKED, "max_tokens": 300, "temperature": 0, "stream": True} | fields
    status, answer = server.http(MESSAGES, body)
    assert status == 200, answer
    told = [event.split("\n") for event in answer.decode().split("\n\n") if event.startswith("event: ")]
    found = [(name[7:], json.loads(data[6:])) for name, data in told]
    assert all(name == data["type"] for name, data in found)
    return found


def accumulated(found):
    """The message that a client makes of a stream's events."""
    message, arguments = None, {}
    for name, data in found:
        if name == "message_start":
            message = data["message"]
        elif name == "content_block_start":
            assert data["index"] == len(message["content"])
            message["content"].append(data["content_block"])
        elif name == "content_block_delta":
            block, delta = message["content"][data["index"]], data["delta"]
            if delta["type"] == "input_json_delta":
                arguments[data["index"]] = arguments.get(data["index"], "") + delta["partial_json"]
            else:
                key = delta["type"].removesuffix("_delta")
                block[key] += delta[key]
        elif name == "content_block_stop" and data["index"] in arguments:
            message["content"][data["index"]]["input"] = json.loads(arguments[data["index"]])
        elif name == "message_delta":
            message |= data["delta"] | {"usage": message["usage"] | data["usage"]}
    return message


def without_ids(message):
    content = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    usage = {key: message["usage"][key] for key in ("output_tokens", "output_tokens_details")}
    return message | {"id": None, "content": content, "usage": usage}


# --- answers ---


@pytest.mark.parametrize(
    ("said", "fields", "kinds", "reason"),
    [
        ("So. " * 9, {}, ["text"], "end_turn"),
        (THOUGHT, {"tools": OURS}, ["thinking", "text", "tool_use", "tool_use"], "tool_use"),
        ("<think>only", {"max_tokens": 9}, ["thinking"], "max_tokens"),
        ("<eos>", {}, ["text"], "end_turn"),
        (IN_ROME, {"tools": OURS, "tool_choice": {"type": "auto"}}, ["tool_use"], "tool_use"),
        ("So.", {"output_config": {"format": FORM}}, ["text"], "end_turn"),
        ("So.", {"output_format": FORM}, ["text"], "end_turn"),
    ],
)
def test_a_stream_tells_the_same_message_in_order(server, said, fields, kinds, reason):
    whole = ask(server, user=said, **fields)[1]
    assert [block["type"] for block in whole["content"]] == kinds and whole["stop_reason"] == reason
    assert not {"output_config", "output_format"} & {*fields} or json.loads(whole["content"][0]["text"]) == {"a": 3}
    found = events(server, user=said, **fields)
    assert without_ids(accumulated(found)) == without_ids(whole)
    names = [name for name, _ in found]
    assert names[:3] == ["message_start", "content_block_start", "ping"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    open_block = None
    for name, data in found:
        if name.startswith("content_block"):
            assert (open_block is None) == (name == "content_block_start")
            open_block = data["index"] if name != "content_block_stop" else None
            assert open_block in (None, data["index"])


def test_a_message_says_to_the_bit_what_a_chat_says(server):
    for said in ("the sea and the sea " * 9, None):
        chat = ask(server, CHAT, user=said, max_tokens=90)[1]
        message = ask(server, user=said, max_tokens=90)[1]
        assert message["content"][0]["text"] == chat["choices"][0]["message"]["content"] != ""
        assert message["usage"]["speculation"] == chat["usage"]["speculation"]
        drafts = message["usage"]["speculation"]
        assert said is None or drafts["num_draft_tokens"] > drafts["num_accepted_tokens"] > 0
        plain = ask(server, user=said, max_tokens=90, method="ar")[1]
        assert plain["content"] == message["content"]


def test_a_stop_sequence_is_named(server):
    said = "one, two; three<eos>"
    for stops, text, found in (([";"], "one, two", ";"), (["; t", ", t"], "one", ", t"), (["nothing"], None, None)):
        whole = ask(server, user=said, stop_sequences=stops)[1]
        assert text is None or whole["content"][0]["text"] == text
        assert whole["stop_reason"] == ("stop_sequence" if found else "end_turn") and whole["stop_sequence"] == found
        assert without_ids(accumulated(events(server, user=said, stop_sequences=stops))) == without_ids(whole)


def test_thoughts_are_as_asked_for(server):
    off, said = "<assistant><think>\n\n</think>\n\n", "<think>\nhm\n</think>\n\nSo."
    assert ask(server, thinking={"type": "disabled"}, user="So.")[0] == 200 and server.service.prompt.endswith(off)
    assert ask(server, output_config={"effort": "low"}, user="So.")[0] == 200
    assert "(low)" in server.service.prompt
    for thinking in ({"type": "enabled", "budget_tokens": 2000}, {"type": "adaptive"}, None):
        thought, answer = ask(server, thinking=thinking, user=said)[1]["content"]
        assert thought["thinking"] == "hm" and thought["signature"] and answer["text"] == "So."
    blocks = ask(server, thinking={"type": "adaptive", "display": "omitted"}, user=said)[1]["content"]
    assert [block["type"] for block in blocks] == ["text"]
    with running(think=False) as quiet:
        for kind, end in (("adaptive", off), ("enabled", "<assistant>")):
            assert ask(quiet, thinking={"type": kind}, user="So.")[0] == 200 and quiet.service.prompt.endswith(end)


# --- prompts ---

CALL = {"id": "toolu_1", "name": "weather", "input": {"place": "Rome"}}
CHATS_CALL = {"id": "toolu_1", "type": "function",
              "function": {"name": "weather", "arguments": '{"place": "Rome"}'}}  # fmt: skip
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


def text(*texts):
    return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in texts]


def user(content):
    return {"role": "user", "content": content}


def result(content, **fields):
    return [*ASKED, {"role": "assistant", "content": [{"type": "tool_use", **CALL}]},
            user([{"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **fields}])]  # fmt: skip


def results(content):
    return [*ASKED, {"role": "assistant", "content": None, "tool_calls": [CHATS_CALL]},
            {"role": "tool", "tool_call_id": "toolu_1", "content": content}]  # fmt: skip


SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
SYSTEM = {"role": "system", "content": "Be brief."}
# The fields of a message, and the messages of the chat that has the same prompt.
SAME = [
    ({"messages": [user(text("a ", "b"))]}, [user("a b")]),
    ({"system": "Be brief."}, [SYSTEM, *ASKED]),
    ({"system": text("Be brief.")}, [SYSTEM, *ASKED]),
    ({"system": text("x-anthropic-billing-header: cch=1;", "Be", "brief.")},
     [{"role": "system", "content": "Be\n\nbrief."}, *ASKED]),
    ({"system": text("x-anthropic-billing-header: cch=1;")}, ASKED),
    ({"messages": [SYSTEM, *ASKED]}, [SYSTEM, *ASKED]),
    ({"system": "Be", "messages": [{"role": "system", "content": text("brief.")}, *ASKED]},
     [{"role": "system", "content": "Be\n\nbrief."}, *ASKED]),
    ({"messages": [*ASKED, SYSTEM]}, [user("?\n\nBe brief.")]),
    ({"messages": [user("a"), user("b")]}, [user("a\n\nb")]),
    ({"messages": [*ASKED, {"role": "assistant", "content": "The sea "}]},
     [*ASKED, {"role": "assistant", "content": "The sea "}]),
    ({"messages": [*ASKED, {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "a"}]}, *ASKED]},
     [*ASKED, {"role": "assistant", "content": "a", "reasoning_content": "hm"}, *ASKED]),
    ({"messages": [user([
        {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "words"}},
        {"type": "document", "source": {"type": "content", "content": text("more")}},
        {"type": "search_result", "title": "S", "source": "s", "content": text("found")}, *text("?")])]},
     [user("T\nwords\n\nmore\n\nS\ns\nfound\n\n?")]),
    ({"messages": result("rain")}, results("rain")),
    ({"messages": result(text("rain", "wind"))}, results("rain\nwind")),
    ({"messages": result("no such place", is_error=True)}, results("Error: no such place")),
    ({"messages": result([*text("seen:"), IMAGE])}, results("seen:\n[image left out: the model reads text]")),
    ({"messages": result(None)}, results("")),
    ({"tools": OURS}, ASKED),
    ({"tools": OURS, "messages": result("rain")}, results("rain")),
    ({"tools": OURS, "tool_choice": {"type": "none"}}, ASKED),
    ({"tools": [*OURS, SEARCH, {"type": "bash_20250124", "name": "bash"},
                {"type": "browser_toolset_20260801"}]}, ASKED),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(SAME)))
def test_the_prompt_is_that_of_the_same_chat(server, number):
    fields, messages = SAME[number]
    chat = {"messages": messages, "tools": THEIRS if "tools" in fields else []}
    if fields.get("tool_choice"):
        chat["tool_choice"] = "none"
    status, theirs = ask(server, CHAT, **chat, max_tokens=9)
    assert status == 200, theirs
    prompt = server.service.prompt
    status, ours = ask(server, **fields, max_tokens=9)
    assert status == 200, ours
    assert server.service.prompt == prompt
    usage = ours["usage"]
    kept = usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    assert usage["input_tokens"] + kept == theirs["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == theirs["usage"]["completion_tokens"] and usage["cache_read_input_tokens"] > 0
    assert ask(server, COUNT, **fields) == (200, {"input_tokens": usage["input_tokens"] + kept})


# --- tools ---


def test_a_message_is_read_back_with_its_calls_and_thoughts(server):
    first = ask(server, tools=OURS, user=THOUGHT)[1]
    calls = [block for block in first["content"] if block["type"] == "tool_use"]
    assert [(call["name"], call["input"]) for call in calls] == [("weather", {"place": "Rome"}), ("time", {})]
    told = [{"type": "tool_result", "tool_use_id": call["id"], "content": "rain"} for call in calls]
    turns = [*ASKED, {"role": "assistant", "content": first["content"]}, user([*told, *text("And?")])]
    second = ask(server, tools=OURS, messages=turns, user="It rains.")[1]
    assert second["content"][0]["text"] == "It rains." and second["stop_reason"] == "end_turn"
    assert "<think>hm</think>Wait." in server.service.prompt and server.service.prompt.count("rain") == 2


def test_a_choice_of_tools_binds_the_answer(server):
    bound = [OURS[0], OURS[0] | {"name": "weather_there"}]
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather_there"}):
        whole = ask(server, tools=bound, tool_choice=choice, user="No.")[1]
        (call,) = whole["content"]
        assert whole["stop_reason"] == "tool_use" and call["input"]["place"] in ("Rome", "Oslo")
        assert choice["type"] == "any" or call["name"] == "weather_there"
    for parallel in (False, True):
        choice = {"type": "auto", "disable_parallel_tool_use": not parallel}
        whole = ask(server, tools=OURS, tool_choice=choice, user=f"{TAGGED}\n{TAGGED}")[1]
        assert len(whole["content"]) == 1 + parallel
    cut = ask(server, user=TAGGED, tools=OURS, max_tokens=len("<tool_call>") + 45)[1]  # no whole call
    assert cut["stop_reason"] == "max_tokens" and cut["content"][0]["name"] == "weather"


def test_deferred_tools_come_when_they_are_named(server):
    later = [OURS[0], OURS[1] | {"defer_loading": True}]

    def offered(messages):
        assert ask(server, tools=later, messages=messages, max_tokens=3)[0] == 200
        return [name for name in ("weather", "time") if f'"name": "{name}", "parameters"' in server.service.prompt]

    def change(kind, **tool):
        return {"role": "system", "content": [{"type": kind, "tool": tool}]}

    assert offered(ASKED) == ["weather"]
    assert offered(result([{"type": "tool_reference", "tool_name": "time"}])) == ["weather", "time"]
    named = {"type": "tool_reference", "name": "time"}
    assert offered([*ASKED, change("tool_addition", **named)]) == ["weather", "time"]
    assert offered([*ASKED, change("tool_addition", type="tool_definition", definition=OURS[1])]) == ["weather", "time"]
    assert offered([*ASKED, change("tool_addition", **named), change("tool_removal", **named)]) == ["weather"]


# --- what is passed over, what is refused ---


HARMLESS = {
    "metadata": {"user_id": "a"}, "service_tier": "standard_only", "inference_geo": "eu", "speed": "standard",
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, "container": None,
    "mcp_servers": [], "diagnostics": {"previous_message_id": None}, "cache_control": {"type": "ephemeral"},
    "betas": ["a"], "of_next_year": 3,
}  # fmt: skip


def test_what_changes_no_answer_is_passed_over(server):
    status, answer = over_http(
        f"{server.url}{MESSAGES}?beta=true", {"messages": ASKED, "max_tokens": 9, "user": "So.", **HARMLESS}, 60,
        **{"anthropic-version": "2023-06-01", "anthropic-beta": "a,b", "x-api-key": "none"},
    )  # fmt: skip
    assert status == 200 and json.loads(answer)["content"][0]["text"] == "So."


MISTAKES = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "nobody", "content": "a"}]}, "messages.0.role"),
    ({"messages": [user([IMAGE])]}, "image"),
    ({"messages": [user([{"type": "document", "source": {"type": "base64", "data": "x"}}])]}, "document"),
    ({"messages": [user([{"type": "server_tool_use", "id": "a", "name": "web_search"}])]}, "server_tool_use"),
    ({"messages": [user([{"type": "text"}])]}, "text"),
    ({"messages": [user([{"type": "tool_use", "id": "a"}])]}, "name"),
    ({"messages": [user([{"type": "tool_result", "content": "a"}])]}, "tool_use_id"),
    ({"system": [IMAGE]}, "system"),
    ({"tools": [{"name": "a"}]}, "input_schema"),
    ({"tools": OURS, "tool_choice": {"type": "tool", "name": "nobody"}}, "nobody"),
    ({"tools": OURS, "tool_choice": {"type": "sometimes"}}, "sometimes"),
    ({"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "web_search"),
    ({"tool_choice": {"type": "any"}}, "tool"),
    ({"stop_sequences": [""]}, "stop"),
    ({"output_config": {"format": {"type": "xml"}}}, "xml"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"container": "x"}, "container"),
    ({"stop": ["a"]}, "stop"),
    ({"n": 2}, "n"),
]


def test_what_cannot_be_served_is_refused_by_name(server):
    for fields, named in MISTAKES:
        status, refused = ask(server, **fields)
        assert status == 400 and refused["type"] == "error" and refused["request_id"].startswith("req_"), fields
        assert refused["error"]["type"] == "invalid_request_error" and named in refused["error"]["message"], fields


def test_a_prompt_that_is_too_long_says_by_how_much(server):
    long = [user("a" * 1300)]
    tokens = ask(server, COUNT, messages=long)[1]["input_tokens"]
    for stream in (False, True):
        status, refused = ask(server, messages=long, stream=stream)
        assert status == 400 and refused["error"]["type"] == "invalid_request_error"
        assert refused["error"]["message"] == f"prompt is too long: {tokens} tokens > 1200 maximum"


def test_guards_refuse_in_the_form_of_the_api():
    def kind(path, body, **headers):
        status, answer = over_http(f"{server.url}{path}", body, 60, **headers)
        return status, json.loads(answer)["error"]["type"] if status != 200 else None

    body, key = {"messages": ASKED, "max_tokens": 3}, {"x-api-key": "one"}
    with running(keys={"ann": "one"}, max_body_bytes=2000, hosts=("127.0.0.1",)) as server:
        for named in ({"x-api-key": "one"}, {"authorization": "Bearer one"},
                      {"x-api-key": "one", "authorization": "Bearer none"}):  # fmt: skip
            assert kind(MESSAGES, body, **named) == (200, None)
        for wrong in ({}, {"x-api-key": "two"}, {"x-api-key": ""}, {"authorization": "Basic one"}):
            assert kind(MESSAGES, body, **wrong) == (401, "authentication_error")
        assert kind("/v1/models", None, **{"anthropic-version": "1"}) == (401, "authentication_error")
        for path, sent, headers, status, name in (
            (CHAT, body, {}, 200, None),
            (MESSAGES, b"a" * 3000, {}, 413, "request_too_large"),
            (MESSAGES, b'{"a": ', {}, 400, "invalid_request_error"),
            (MESSAGES, body | {"model": "claude"}, {}, 404, "not_found_error"),
            (COUNT, body | {"model": "claude"}, {}, 404, "not_found_error"),
            (f"{MESSAGES}/batches", body, {}, 404, "not_found_error"),
            (MESSAGES, None, {}, 405, "invalid_request_error"),
            (MESSAGES, body, {"host": "elsewhere.example"}, 403, "permission_error"),
        ):
            assert kind(path, sent, **key, **headers) == (status, name)
        status, answer = over_http(f"{server.url}{CHAT}", {"messages": []}, 60, **key)
        assert status == 400 and "param" in json.loads(answer)["error"]  # OpenAI's endpoints keep their form
        for path in ("/", MESSAGES):
            asked = http.client.HTTPConnection("127.0.0.1", server.server.port)
            asked.request("HEAD", path, headers=key)
            answer = asked.getresponse()
            assert answer.status == 200 and answer.read() == b""


def test_an_error_in_mid_stream_is_an_event():
    with running(context=20_000, slots=1) as server:
        assert ask(server)[0] == 200
        server.service.settings = replace(server.service.settings, timeout=1e-9)
        found = events(server)
        assert [name for name, _ in found] == ["message_start", "error"]
        assert found[1][1]["error"]["type"] == "timeout_error" and found[1][1]["request_id"]
        assert ask(server)[0] == 504


def test_models_are_listed_in_both_forms(server):
    status, answer = server.http("/v1/models")
    found = json.loads(answer)
    assert status == 200 and found["object"] == "list" and found["has_more"] is False
    assert found["first_id"] == found["last_id"] == found["data"][0]["id"] == "tiny"
    for model in (found["data"][0], json.loads(server.http("/v1/models/tiny")[1])):
        assert (model["type"], model["object"], model["display_name"]) == ("model", "model", "tiny")
        assert model["created_at"].endswith("Z") and model["max_input_tokens"] == 1200
