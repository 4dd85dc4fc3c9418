"""What ordinary clients send is served, and what cannot be is refused by name: limits, responses, thoughts, errors."""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.request
from dataclasses import replace

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")

from longdraft import Speculator
from longdraft.serve.service import Service
from tests.exact.outside.test_tools import TAGGED, TOOLS, LedService
from tests.serve.bytes import byte_model, byte_tokenizer
from tests.serve.conftest import Running, make_service
from tests.serve.over_http import wait_until
from tests.support.tiny import tiny_model

THINKS = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m['content'] }}<eos>{% endfor %}{% if reasoning_effort %}({{ reasoning_effort }}){% endif %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% if opened %}<think>\n{% endif %}{% endif %}"
)
MODEL, TOKENIZER = byte_model(), byte_tokenizer(THINKS)
ASKED = [{"role": "user", "content": "?"}]
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


def led(of=MODEL, **settings) -> Service:
    """A service whose model says what a request's ``user`` field says."""
    service = make_service(of, TOKENIZER, **{"slots": 2, "context": 1200} | settings)
    service.__class__ = LedService
    return service


@pytest.fixture(scope="module")
def server():
    with contextlib.closing(Running(led())) as running:
        yield running


def ask(server, path=CHAT, **fields):
    usual = {"temperature": 0} | ({"messages": ASKED} if path == CHAT else {})
    status, answer = server.http(path, usual | fields)
    return status, json.loads(answer)


def prompt(server, **fields):
    """The prompt of a chat, as text."""
    status, answer = ask(server, "/tokenize", **{"messages": ASKED} | fields, temperature=None)
    assert status == 200, answer
    return TOKENIZER.decode(answer["tokens"])


# --- limits ---


def test_an_answer_has_the_room_that_is_left_or_the_servers_own_limit():
    with contextlib.closing(Running(led(context=150))) as small:
        for limit in ({}, {"max_tokens": -1}, {"max_tokens": 10**6}, {"max_completion_tokens": 32000}):
            status, answer = ask(small, ignore_eos=True, **limit)
            assert status == 200 and answer["usage"]["total_tokens"] == 150
            assert answer["choices"][0]["finish_reason"] == "length"
    with contextlib.closing(Running(led(max_tokens=7))) as limited:  # a bound and no refusal
        for limit in ({}, {"max_tokens": 500}, {"max_tokens": 3}):
            expected = min(7, limit.get("max_tokens", 7))
            assert ask(limited, ignore_eos=True, **limit)[1]["usage"]["completion_tokens"] == expected
            found = ask(limited, RESPONSES, input="?", max_output_tokens=limit.get("max_tokens"), user="a" * 60)[1]
            assert found["usage"]["output_tokens"] == expected and found["status"] == "incomplete"


@pytest.fixture(scope="module")
def hurried():
    """A server whose requests have half a second; one answer at a time."""
    service = led(timeout=0.5, context=20_000, slots=1, of=tiny_model(vocab=264, context=20_000))
    with contextlib.closing(Running(service)) as running:
        wait_until(lambda: ask(running, max_tokens=1)[0] == 200)  # the first one makes the session
        yield running


def in_time(running, path, body, is_enough=lambda answer: True):
    """An answer that has a token at least, and is enough, however slow this machine is."""
    status, answer = running.http(path, body)
    while running.service.settings.timeout < 30:
        if b'"code":"timeout"' not in answer.replace(b" ", b"") and is_enough(answer):
            break
        running.service.settings = replace(running.service.settings, timeout=2 * running.service.settings.timeout)
        status, answer = running.http(path, body)
    return status, answer


def pieces(path, answer):
    """What a whole or a streamed answer says, the last object with a finish reason or a status, and the usage."""
    lines = [line[6:] for line in answer.splitlines() if line.startswith("data: {")] or [answer]
    found = [json.loads(line) for line in lines]
    if path == RESPONSES:
        last = found[-1].get("response", found[-1])
        return last["output"][0]["content"][0]["text"], last["status"], last["usage"]["speculation"]
    choices = [choice for each in found for choice in each["choices"]]
    texts = [c["text"] if "text" in c else c.get("delta", c.get("message")).get("content", "") for c in choices]
    return "".join(texts), choices[-1]["finish_reason"], found[-1]["usage"]["speculation"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", RESPONSES])
def test_an_answer_that_takes_too_long_ends_with_what_was_written(hurried, path, stream):
    body = {"temperature": 0, "stream": stream, "user": "word " * 3000}
    body |= {"messages": ASKED} if path == CHAT else {"prompt": "?"} if path != RESPONSES else {"input": "?"}
    body |= {"stream_options": {"include_usage": True}, "ignore_eos": True} if path != RESPONSES else {}

    def is_enough(answer):
        text, _, drafts = pieces(path, answer.decode())
        return len(text) > 10 and drafts["num_accepted_tokens"] > 0

    status, answer = in_time(hurried, path, body, is_enough)
    text, end, drafts = pieces(path, answer.decode())
    assert status == 200 and end in ("length", "incomplete") and len(text) > 10
    assert ("word " * 3000).startswith(text)
    assert drafts["num_draft_tokens"] >= drafts["num_accepted_tokens"] > 0


def test_answers_that_wait_while_others_take_too_long_are_empty(hurried):
    body = {"messages": ASKED, "temperature": 0, "n": 3, "user": "word " * 3000}
    status, found = in_time(hurried, CHAT, body, lambda answer: b"word word" in answer)
    answer = json.loads(found)
    first, *others = answer["choices"]
    assert status == 200 and first["message"]["content"].startswith("word word")
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 3
    assert all(other["message"]["content"] == "" for other in others)
    hurried.service.settings = replace(hurried.service.settings, timeout=0.05)
    status, answer = ask(hurried, messages=[{"role": "user", "content": "a" * 19_000}])
    assert status == 504 and answer["error"]["code"] == "timeout"  # it was not even read
    assert hurried.becomes_idle()


# --- responses ---

FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]


def test_a_response_is_read_back_with_its_calls_and_thoughts(server):
    client, turns = server.client(), [{"role": "user", "content": "?"}]
    create = client.responses.create
    first = create(model="tiny", input=turns, tools=FLAT, user=f"<think>\nhm\n</think>\n\nWait.{TAGGED}", temperature=0)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    call = first.output[2]
    assert first.output_text == "Wait." and json.loads(call.arguments) == {"place": "Rome"} and call.name == "weather"
    assert first.usage.output_tokens_details.reasoning_tokens > 0
    turns += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    second = create(model="tiny", input=turns, tools=FLAT, user="It rains.", temperature=0)
    assert second.output_text == "It rains." and second.status == "completed"
    events = list(create(model="tiny", input=turns, tools=FLAT, user=f"Well.{TAGGED}", temperature=0, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    told = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
    assert told == events[-1].response.output[1].arguments == '{"place": "Rome"}'
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Well."
    done = [e.item.type for e in events if e.type == "response.output_item.done"]
    assert done == ["message", "function_call"] and events[-1].type == "response.completed"


# --- prefill, tools and thoughts ---


def test_a_last_message_of_the_assistants_is_continued(server):
    begun = [*ASKED, {"role": "assistant", "content": "The sea "}]
    assert prompt(server, messages=begun) == "<user>?<eos><assistant>The sea "
    assert prompt(server, messages=begun, continue_final_message=True).endswith("<assistant>The sea ")
    assert prompt(server, messages=begun, add_generation_prompt=True).endswith("The sea <eos><assistant>")
    assert prompt(server, messages=begun, continue_final_message=False).endswith("The sea <eos><assistant>")
    expected = Speculator("ar", MODEL, TOKENIZER, plan="fixed").generate(
        TOKENIZER("<user>?<eos><assistant>The sea ", add_special_tokens=False)["input_ids"], max_new_tokens=9
    )
    assert ask(server, messages=begun, max_tokens=9)[1]["choices"][0]["message"]["content"] == expected[0].text
    for wrong in ({"messages": ASKED}, {"messages": begun, "add_generation_prompt": True}):
        status, refused = ask(server, continue_final_message=True, **wrong)
        assert status == 400 and refused["error"]["param"] == "continue_final_message"


def test_a_template_without_tools_gets_them_in_words_and_one_with_tools_gets_objects(server):
    call = {"id": "1", "type": "function", "function": {"name": "time", "arguments": '{"zone": "CET"}'}}
    history = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [call]},
               {"role": "tool", "content": "12:00", "tool_call_id": "1"}]  # fmt: skip
    shown = prompt(server, messages=history, tools=TOOLS)
    assert shown.startswith("<system>") and '"place"' in shown.partition("<user>")[0]
    assert '<tool_call>{"name": "time", "arguments": {"zone": "CET"}}</tool_call>' in shown
    assert "<user><tool_response>12:00</tool_response>" in shown
    written = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments.zone }}{% endfor %}"
    written += "{% endfor %}{{ tools | map(attribute='type') | list }}"
    knows = make_service(MODEL, byte_tokenizer(written), slots=1, context=1200)
    with contextlib.closing(Running(knows)) as other:
        assert prompt(other, messages=history, tools=TOOLS) == "CET['function', 'function']"
    # Text that is no JSON is passed on.
    call["function"]["arguments"] = "{broken"
    assert "{broken" in prompt(server, messages=history)


def test_templates_are_told_what_to_do_about_thoughts(server):
    off = "<assistant><think>\n\n</think>\n\n"
    assert prompt(server, chat_template_kwargs={"enable_thinking": False}).endswith(off)
    assert prompt(server, reasoning_effort="none").endswith(off)
    assert "(low)" in prompt(server, reasoning_effort="low")
    said = [*ASKED, {"role": "assistant", "content": "a", "reasoning_content": "hm"}, *ASKED]
    assert "<think>hm</think>a" in prompt(server, messages=said)
    with contextlib.closing(Running(led(think=False))) as quiet:
        assert prompt(quiet).endswith(off)
        assert prompt(quiet, chat_template_kwargs={"enable_thinking": True}).endswith("<assistant>")
    for taken in ("chat_template", "tools", "tokenize", "return_dict"):
        status, refused = ask(server, chat_template_kwargs={taken: "x"})
        assert status == 400 and refused["error"]["param"] == f"chat_template_kwargs.{taken}"


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_thought_is_apart_from_what_is_said(server, stream):
    def parts(text, **fields):
        body = {"messages": ASKED, "temperature": 0, "user": text, "stream": stream, "max_tokens": 200} | fields
        answer = server.http(CHAT, body)[1].decode()
        lines = [line[6:] for line in answer.splitlines() if line.startswith("data: {")] if stream else [answer]
        found = [c["delta"] if stream else c["message"] for x in lines for c in json.loads(x)["choices"]]
        return tuple("".join(d.get(key) or "" for d in found) for key in ("reasoning_content", "content"))

    text = "<think>\nOne\n\ntwo < three\n</think>\n\n<b>Said.</b>\n"
    assert parts(text) == ("One\n\ntwo < three", "<b>Said.</b>\n")
    assert parts(text, reasoning_format="none") == ("", text)
    assert parts(text, include_reasoning=False) == ("", "<b>Said.</b>\n")
    assert parts("hm</think>So.", chat_template_kwargs={"opened": True}) == ("hm", "So.")
    assert parts("<thin> is thin, <think> too") == ("", "<thin> is thin, <think> too")
    assert parts("<think>on and on</thi", max_tokens=18) == ("on and on</", "")
    # What it thinks of a call is none.
    assert parts(f"<think>{TAGGED}?</think>no", tools=TOOLS) == (f"{TAGGED}?", "no")


# --- one request does not stop the others ---


def test_others_are_answered_while_a_request_is_prepared():
    with contextlib.closing(Running(led(context=4000))) as server:
        words = "the whale and the ship " * 3000
        many = {"anyOf": [{"type": "object", "properties": {f"k{i}": {"type": "string"}}} for i in range(900)]}
        large = [
            (CHAT, {"messages": ASKED, "stop": [words], "max_tokens": 9, "temperature": 0}),
            ("/tokenize", {"prompt": words * 8}),
            (CHAT, {"messages": ASKED, "response_format": {"type": "json_object", "schema": many}, "max_tokens": 9}),
            (CHAT, {"messages": [{"role": "user", "content": words}]}),
        ]
        statuses, answered = [], 0
        threads = [threading.Thread(target=lambda p=p, b=b: statuses.append(server.http(p, b)[0])) for p, b in large]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert server.http("/health")[0] == 200
            answered += len(statuses) < 4
        assert sorted(statuses) == [200, 200, 400, 400] and answered > 9  # the schema is too much for a grammar


def test_preparing_a_request_has_a_limit_of_time():
    with contextlib.closing(Running(led(prepare_timeout=0.05))) as server:
        assert ask(server, "/tokenize", prompt="the whale " * 200000, temperature=None)[0] == 504
        assert server.http("/health")[0] == 200


def test_a_stream_says_that_it_lives_while_nothing_comes():
    """Of several texts, as a busy machine may read one of them between two looks."""
    with contextlib.closing(Running(led(sse_ping_interval=0.0005, slots=1))) as server:
        for path, field, count in ((CHAT, "messages", "max_tokens"), (RESPONSES, "input", "max_output_tokens")):
            comments: list[str] = []
            for letter in "abcdefgh":
                body = {field: [{"role": "user", "content": letter * 900}], count: 30, "stream": True, "method": "ar"}
                lines = server.http(path, body)[1].decode().splitlines()
                assert lines[-2].startswith("data: ")
                comments += [line for line in lines if line.startswith(":") and " of " in line]
            assert comments


# --- mistakes ---

DEEP = json.loads("[" * 300 + "]" * 300)


def part(kind):
    return [{"role": "user", "content": [{"type": kind}]}]


# Path, fields, what the error names: the field, and of content that is no text its kind.
MISTAKES = [
    # Fields that would change the answer.
    (CHAT, {"audio": {"voice": "a"}}, "audio", "audio"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities", "modalities"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions", "functions"),
    (CHAT, {"guided_json": {}}, "guided_json", "guided_json"),
    (CHAT, {"stop_token_ids": [3]}, "stop_token_ids", "stop_token_ids"),
    (CHAT, {"best_of": 2}, "best_of", "best_of"),
    (CHAT, {"prompt": "a"}, "prompt", "prompt"),
    (CHAT, {"messages": [{"role": "assistant", "audio": {"id": "a"}}, *ASKED]}, "messages.0.audio", "audio"),
    ("/v1/completions", {"prompt": "a", "best_of": 3}, "best_of", "best_of"),
    ("/v1/completions", {"prompt": "a", "response_format": {"type": "json_object"}}, "response_format", ""),
    (RESPONSES, {"input": "?", "n": 2}, "n", "n"),
    (RESPONSES, {"input": "?", "top_logprobs": 2}, "top_logprobs", "top_logprobs"),
    (RESPONSES, {"input": "?", "max_tokens": 2}, "max_tokens", "max_tokens"),
    (RESPONSES, {"input": "?", "background": True}, "background", "background"),
    (RESPONSES, {"input": "?", "conversation": "conv_1"}, "conversation", "conversation"),
    (RESPONSES, {"input": "?", "prompt": {"id": "pmpt_1"}}, "prompt", "prompt"),
    (RESPONSES, {"input": "?", "tools": FLAT, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
        {"type": "function", "name": "nobody"}]}}, None, "nobody"),
    # And values that cannot be.
    (CHAT, {"temperature": 3}, "temperature", ""),
    (CHAT, {"n": 99}, "n", ""),
    (CHAT, {"max_tokens": 0}, "max_tokens", ""),
    (CHAT, {"messages": []}, "messages", ""),
    (CHAT, {"messages": [{"role": "nobody", "content": "a"}]}, "messages.0.role", "nobody"),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, None, ""),
    (CHAT, {"messages": part("image_url")}, "messages.0.content.0.type", "image_url"),
    (CHAT, {"method": "nonsense"}, "method", "nonsense"),
    (CHAT, {"logit_bias": {"999": 1}}, "logit_bias", "999"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs", ""),
    (CHAT, {"metadata": {"a": DEEP}}, None, ""),
    (CHAT, {"tools": TOOLS, "tool_choice": "sometimes"}, None, "sometimes"),
    (CHAT, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nobody"}}}, None, "nobody"),
    (CHAT, {"tools": TOOLS, "tool_choice": {"function": {"name": None}}}, None, "tool_choice"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": 3}}]}, None, "tools"),
    (CHAT, {"tools": [{"type": "custom", "custom": {"name": {"a": 1}, "format": 3}}]}, None, "tools"),
    (CHAT, {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "tools": 7}}, None, "tool_choice"),
    (CHAT, {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": {"a": 1}, "tools": FLAT}}, None, "tool"),
    (RESPONSES, {"input": [{"type": ["a"]}, 3]}, "input.0.type", ""),
    (RESPONSES, {"input": "?", "tools": [{"type": ["a"]}], "tool_choice": "required"}, None, "tool"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "a", "parameters": 3}}]}, None, "tools"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"enum": DEEP}}}]}, None, ""),
    (CHAT, {"response_format": {"type": "xml"}}, None, "xml"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": None}}, None, "json_schema"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}}, None, "schema"),
    (RESPONSES, {"input": []}, "input", ""),
    (RESPONSES, {"input": part("input_image")}, "input.0.content.0.type", "input_image"),
    (RESPONSES, {"input": [{"type": "item_reference"}]}, None, "item_reference"),
    (RESPONSES, {"input": [{"type": "reasoning"}, {"type": "message"}]}, None, "message"),
    (RESPONSES, {"input": [{"type": "function_call"}]}, None, "function_call"),
    (RESPONSES, {"input": "?", "tools": [{"type": "web_search"}], "tool_choice": "required"}, None, "tools"),
    (RESPONSES, {"input": "?", "tools": TOOLS}, None, "tools"),
    (RESPONSES, {"input": "?", "tools": FLAT, "tool_choice": {"type": "web_search"}}, None, "tool_choice"),
    (RESPONSES, {"input": "?", "text": {"format": {"type": "xml"}}}, "text.format.type", "xml"),
    (RESPONSES, {"input": "?", "previous_response_id": "resp_1"}, "previous_response_id", ""),
    ("/v1/completions", {"prompt": []}, "prompt", "empty"),
    ("/v1/completions", {"prompt": "a", "suffix": "b"}, None, "suffix"),
    ("/v1/completions", {"prompt": [[]]}, "prompt", "empty"),
    ("/v1/completions", {"prompt": [10**9]}, "prompt", ""),
    ("/v1/completions", {"prompt": ["a"] * 16, "n": 5}, None, ""),
    ("/tokenize", {"messages": [], "temperature": None}, "messages", ""),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "param", "named"), MISTAKES, ids=lambda value: str(value)[:40])
def test_a_clients_mistake_is_a_400_and_the_next_request_is_served(server, path, fields, param, named):
    status, answer = ask(server, path, **fields)
    error = answer["error"]
    assert status == 400 and error["type"] == "invalid_request_error" and error["message"] and named in error["message"]
    assert param in (None, error["param"]) and server.http("/health")[0] == 200


def test_a_body_that_is_deep_or_no_object_is_a_400(server):
    for levels in (90, 400, 700, 950, 5000, 200_000):
        body = b'{"messages": [{"role": "user", "content": "?"}], "max_tokens": 1, "metadata": {"a": '
        body += b"[" * levels + b"]" * levels + b"}}"
        assert server.http(CHAT, body)[0] == (200 if levels < 96 else 400)
    for body in (b"\xff\xfe", b'"text"', b"[]", b"3", b'{"temperature": 1e999}', b""):
        assert server.http(CHAT, body)[0] == 400


def test_empty_or_odd_forms_that_mean_nothing_are_served(server):
    assert ask(server, RESPONSES, input="?", text={"format": None}, tools=[], user="yes")[0] == 200
    assert ask(server, tools=[], tool_choice="none", user="yes")[0] == 200
    kept = [{"type": "text", "text": "?", "cache_control": {"type": "ephemeral"}}]
    assert ask(server, messages=[{"role": "user", "content": kept}], user="yes")[0] == 200
    assert ask(server, tools=None, response_format=None, stop=None, user="yes")[0] == 200


def test_a_split_characters_log_probabilities_have_its_bytes(server):
    body = {"user": "aé→", "logprobs": True, "top_logprobs": 2, "max_tokens": 40}
    found = ask(server, **body)[1]["choices"][0]["logprobs"]["content"]
    assert bytes(byte for token in found for byte in token["bytes"]).startswith("aé→".encode())
    text = {"prompt": "?", "logprobs": 20, "temperature": 0, "max_tokens": 3}
    (choice,) = json.loads(server.http("/v1/completions", text)[1])["choices"]
    assert all(len(best) == 20 for best in choice["logprobs"]["top_logprobs"])  # no two have one name


def test_paths_and_headers_that_are_nearly_right_say_what_is(server):
    assert json.loads(server.http("/v1/models/")[1])["object"] == "list"
    for path in ("/health", "/v1/models", "/"):
        with urllib.request.urlopen(urllib.request.Request(server.url + path, method="HEAD")) as answer:
            assert answer.status == 200 and not answer.read()
    status, answer = ask(server, model="gpt-4")
    assert status == 404 and answer["error"]["param"] == "model"
    status, answer = server.http("/v1/embeddings", {"input": "a"})
    assert status == 404 and "/v1/chat/completions" in json.loads(answer)["error"]["message"]
    request = urllib.request.Request(server.url + CHAT, b"{}", {"content-type": "application/x-www-form-urlencoded"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    assert refused.value.code == 415 and "Content-Type" in json.loads(refused.value.read())["error"]["message"]
