"""LiteLLM: a chat, a stream, a tool call, a completion, an asynchronous chat."""

from __future__ import annotations

import asyncio
import json

import litellm
from questions import ASK_WEATHER, MODEL, QUESTION, TOOL, URL

common = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": "none", "temperature": 0, "max_tokens": 32}
whole = litellm.completion(messages=QUESTION, **common).choices[0].message.content
assert whole
chunks = litellm.completion(messages=QUESTION, stream=True, **common)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole

called = litellm.completion(messages=ASK_WEATHER, tools=[TOOL], tool_choice="required", **common)
(call,) = called.choices[0].message.tool_calls
assert call.function.name == "weather" and json.loads(call.function.arguments)["city"]
answers = [called.choices[0].message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "Sunny"}]
told = litellm.completion(messages=[*ASK_WEATHER, *answers], tools=[TOOL], **common).choices[0].message
assert told.content or told.tool_calls

text = litellm.text_completion(
    prompt="The capital of France is", **{**common, "model": f"text-completion-{common['model']}"}
)
assert text.choices[0].text
assert asyncio.run(litellm.acompletion(messages=QUESTION, **common)).choices[0].message.content == whole
