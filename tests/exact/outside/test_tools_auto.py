"""Tools that a model may call: its text is its own until its own call begins, and each call is told from the text."""

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

    def choices(self, prompt, body, *arguments, **options):
        choices = super().choices(prompt, body, *arguments, **options)
        for choice in choices if body.user else ():
            lead = lambda: Leading(self.tokenizer, len(prompt), body.user)  # noqa: E731
            choice.makers = [lead, *choice.makers]
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
        "<html><body>&lt;</body></html>", "<", "<tool", "</tool_call>", "<tools>\n", "  \n <b>", '{"name": "nobody"}',
        "```html\n<p>\n```", "```", '```json\n{"a": [1, 2]}\n```\n', '[{"name": "wea', "\n\n",
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


@pytest.mark.parametrize("text", [TAGGED, IN_ROME, f"```\n{IN_ROME}"])
def test_a_call_that_is_cut_at_the_limit_is_no_content(server, text):
    begins = max(text.find("<tool_call>") + 11, text.find('"weather"') + 9 if "<tool" not in text else 0)
    for tokens in range(begins, len(text) - 1, 7):
        content, _, reason = said(server, text, max_tokens=tokens)
        assert (content, reason) == ("", "length") or (content, reason) == ("", "tool_calls")


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
    ):
        assert said(server, text, stream, **fields) == (content, calls, reason), (text, fields)


def test_one_call_is_the_last_thing_where_only_one_may_come(server):
    content, calls, _ = said(server, TAGGED + TAGGED + "more", parallel_tool_calls=False)
    assert (content, calls) == ("", [ROME])


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
