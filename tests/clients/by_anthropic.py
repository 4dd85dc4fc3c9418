"""Anthropic's client: messages, streams, tools, structured output, counts of tokens, models, errors."""

from __future__ import annotations

import anthropic
from questions import ASK_WEATHER, CITY_QUESTION, FUNCTION, PARAMETERS, QUESTION, URL, City

client = anthropic.Anthropic(base_url=URL.removesuffix("/v1"), api_key="none", max_retries=0)
(listed,) = client.models.list()
model = listed.id
assert listed.type == "model" and client.models.retrieve(model).id == model
# Newer versions of the client have no temperature.
greedy = {"model": model, "max_tokens": 64, "extra_body": {"temperature": 0}}


weather = {"name": "weather", "description": FUNCTION["description"], "input_schema": PARAMETERS}

whole = client.messages.create(messages=QUESTION, system="Be brief.", **greedy)
assert whole.content[0].text and whole.stop_reason in ("end_turn", "max_tokens"), whole
counted = client.messages.count_tokens(model=model, messages=QUESTION, system="Be brief.")
assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
with client.messages.stream(messages=QUESTION, system="Be brief.", **greedy) as stream:
    assert "".join(stream.text_stream) == whole.content[0].text
    assert stream.get_final_message().usage.output_tokens == whole.usage.output_tokens

stopped = client.messages.create(messages=QUESTION, stop_sequences=[","], **greedy)
assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", ","), stopped

offered = {"tools": [weather], **greedy}
called = client.messages.create(messages=ASK_WEATHER, tool_choice={"type": "any"}, **offered)
call = called.content[-1]
assert called.stop_reason == "tool_use" and "aris" in call.input["city"], called
with client.messages.stream(messages=ASK_WEATHER, tool_choice={"type": "tool", "name": "weather"}, **offered) as stream:
    kinds = [event.type for event in stream]
    assert "input_json" in kinds and stream.get_final_message().content[-1].input == call.input
result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Sunny, 21 degrees"}]}
turns = [*ASK_WEATHER, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
told = client.messages.create(messages=turns, tool_choice={"type": "none"}, **offered)
assert "21" in told.content[0].text, told

parsed = client.messages.parse(messages=CITY_QUESTION, output_format=City, **greedy)
assert parsed.parsed_output.name == "Paris", parsed

beta = client.beta.messages.create(messages=QUESTION, betas=["context-management-2025-06-27"], **greedy)
assert beta.content[0].text

for wrong, kind in (
    ({"model": "claude"}, anthropic.NotFoundError),
    ({"messages": []}, anthropic.BadRequestError),
    ({"messages": [{"role": "user", "content": "word " * 200_000}]}, anthropic.BadRequestError),
):
    try:
        client.messages.create(**{"messages": QUESTION, **greedy} | wrong)
        raise AssertionError(f"{wrong} was taken")
    except kind as error:
        assert error.body["type"] == "error" and error.body["request_id"], error.body
