"""A file of prompts takes what the server takes, and answers as the server does."""

from __future__ import annotations

import contextlib
import json

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

from longdraft import Speculator
from longdraft.batch.output import OutputFile
from longdraft.batch.rows import Defaults, read_lines
from longdraft.batch.run import BatchEngine, run
from tests.serve.bytes import byte_model, byte_tokenizer
from tests.serve.conftest import Running, make_service

MODEL, TOKENIZER = byte_model(), byte_tokenizer()
ASKED = [{"role": "user", "content": "the whale and the ship, the whale and the ship"}]
TOWN = {"type": "object", "properties": {"town": {"enum": ["Rome", "Oslo"]}}, "required": ["town"]}
FORM = {"type": "json_schema", "json_schema": {"name": "t", "schema": TOWN}}
TOOLS = [{"type": "function", "function": {"name": "go", "parameters": TOWN}}]
BODIES = [
    {"max_tokens": 60, "ignore_eos": True},
    {"max_tokens": 100, "response_format": FORM, "seed": 4, "temperature": 1},
    {"max_tokens": 100, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    {"max_tokens": 6, "logprobs": True, "top_logprobs": 2},
    {"max_tokens": 6, "n": 2, "temperature": 1, "seed": 9},
    {"max_tokens": 6, "tools": TOOLS, "logit_bias": {"70": 5}, "presence_penalty": 1},
    {"max_tokens": 6, "stop": ["zz"], "min_tokens": 2},
]


def answered(rows, folder):
    (folder / "in").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = Speculator("prompt-lookup", MODEL, TOKENIZER, plan="fixed")
    with OutputFile(folder / "out", {"input": "a"}) as file:
        decoder = BatchEngine(spec, Defaults(model="tiny"), slots=2)
        figures = decoder.run_with(lambda: run(read_lines(folder / "in", file.num_rows), file, decoder))
    return [json.loads(line) for line in (folder / "out").read_text().splitlines()], figures


def choices(body):
    """A body's choices without the random names of calls."""
    for choice in body["choices"]:
        for call in choice["message"].get("tool_calls", ()):
            call.pop("id")
    return body["choices"]


def test_rows_of_openais_files_are_answered_as_the_server_answers_them(tmp_path):
    bodies = [{"messages": ASKED, "temperature": 0} | body for body in BODIES]
    rows, figures = answered([{"custom_id": str(i), "body": body} for i, body in enumerate(bodies)], tmp_path)
    assert figures.spec_stats.mean_accepted_length > 1  # something was drafted and accepted
    with contextlib.closing(Running(make_service(MODEL, TOKENIZER, context=1200))) as running:
        for body, row in zip(bodies, rows, strict=True):
            status, answer = running.http("/v1/chat/completions", body)
            assert status == row["response"]["status_code"] == 200 and row["error"] is None
            assert choices(row["response"]["body"]) == choices(json.loads(answer))


def test_rows_of_responses_are_answered_as_the_server_answers_them(tmp_path):
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    form = {"format": {"type": "json_schema", "name": "t", "schema": TOWN}}
    bodies = [{"input": ASKED, "temperature": 0, "max_output_tokens": 60} | more for more in (
        {}, {"text": form}, {"tools": flat, "tool_choice": "required", "parallel_tool_calls": False})]  # fmt: skip
    rows = [{"custom_id": str(i), "url": "/v1/responses", "body": body} for i, body in enumerate(bodies)]
    found, figures = answered([*rows, {"custom_id": "bad", "url": "/v1/responses", "body": {"prompt": "a"}}], tmp_path)
    assert figures.spec_stats.mean_accepted_length > 1 and found.pop()["error"]
    assert figures.num_new_tokens == sum(row["response"]["body"]["usage"]["output_tokens"] for row in found)

    def said(body):
        return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in body["output"]]

    with contextlib.closing(Running(make_service(MODEL, TOKENIZER, context=1200))) as running:
        for body, row in zip(bodies, found, strict=True):
            status, answer = running.http("/v1/responses", body)
            assert status == 200 and row["error"] is None and row["response"]["body"]["object"] == "response"
            assert said(row["response"]["body"]) == said(json.loads(answer))


def test_own_rows_have_schemas_tools_and_log_probabilities(tmp_path):
    bad = [{"prompt": "a", "tools": [{"type": "function"}]}, {"prompt": "a", "stream": True}]
    found, _ = answered([*({"messages": ASKED, "id": i, **body} for i, body in enumerate(BODIES)), *bad], tmp_path)
    assert [row.get("id") for row in found] == [*range(len(BODIES)), None, None]
    assert json.loads(found[1]["text"])["town"] in ("Rome", "Oslo") and found[1]["finish_reason"] == "eos"
    (call,) = found[2]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["town"] in ("Rome", "Oslo") and not found[2]["text"]
    assert len(found[3]["logprobs"]["content"]) == 6 and len(found[4]["texts"]) == 2
    assert found[-1]["error"] and found[-2]["error"]
