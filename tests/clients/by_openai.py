"""OpenAI's client: chats, streams, tools, structured output, log-probabilities, completions, responses, errors."""

from __future__ import annotations

import json

import openai
from questions import ASK_WEATHER, CITY_QUESTION, QUESTION, TOOL, URL, City

client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
model = client.models.list().data[0].id
greedy = {"model": model, "temperature": 0, "max_tokens": 48}


whole = client.chat.completions.create(messages=QUESTION, **greedy)
assert whole.choices[0].message.content and whole.usage.total_tokens > whole.usage.completion_tokens > 0

chunks = client.chat.completions.create(
    messages=QUESTION, stream=True, stream_options={"include_usage": True}, **greedy
)
assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content

called = client.chat.completions.create(messages=ASK_WEATHER, tools=[TOOL], tool_choice="required", **greedy)
(call,) = called.choices[0].message.tool_calls
assert called.choices[0].finish_reason == "tool_calls" and "aris" in json.loads(call.function.arguments)["city"]
answer = [called.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees"}]
told = client.chat.completions.create(messages=[*ASK_WEATHER, *answer], **greedy)
assert "21" in told.choices[0].message.content, told

with client.chat.completions.stream(messages=ASK_WEATHER, tools=[TOOL], tool_choice="required", **greedy) as stream:
    names = [event.name for event in stream if event.type == "tool_calls.function.arguments.done"]
    said = stream.get_final_completion().choices[0].message
assert names == ["weather"], names
again = [
    *ASK_WEATHER,
    said,
    {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "Sunny, 21 degrees"},
]
told = client.chat.completions.create(messages=again, tools=[TOOL], **greedy).choices[0].message
assert told.content or told.tool_calls

parsed = client.chat.completions.parse(messages=CITY_QUESTION, response_format=City, **greedy)
assert parsed.choices[0].message.parsed.name == "Paris", parsed

scored = client.chat.completions.create(messages=QUESTION, logprobs=True, top_logprobs=3, **greedy)
assert all(token.logprob == token.top_logprobs[0].logprob for token in scored.choices[0].logprobs.content)

text = client.completions.create(prompt="The capital of France is", logprobs=2, **greedy)
assert "Paris" in text.choices[0].text and text.choices[0].logprobs.tokens

echoed = client.completions.create(prompt="The capital of France is Paris", echo=True, logprobs=1, **greedy)
assert echoed.choices[0].text.startswith("The capital of France is Paris")
assert echoed.choices[0].logprobs.token_logprobs[0] is None and echoed.choices[0].logprobs.token_logprobs[1] < 0

response = client.responses.create(model=model, input="Say hello.", temperature=0, max_output_tokens=24)
assert response.output_text and response.status in ("completed", "incomplete")
with client.responses.stream(model=model, input="Say hello.", temperature=0, max_output_tokens=24) as events:
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
assert said == response.output_text

try:
    client.chat.completions.create(messages=QUESTION, model="gpt-5")
    raise AssertionError("another model's name was taken")
except openai.NotFoundError as error:
    assert model in error.body["message"]
