"""LiteLLM: a chat, a stream, a tool call, a completion, an asynchronous chat."""

from __future__ import annotations

import asyncio
import json
import os

import litellm

common = {
    "model": f"openai/{os.environ['MODEL']}",
    "api_base": os.environ["BASE_URL"],
    "api_key": "none",
    "temperature": 0,
    "max_tokens": 32,
}
question = [{"role": "user", "content": "Name three colours, with commas between them."}]
weather = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}

whole = litellm.completion(messages=question, **common).choices[0].message.content
assert whole
chunks = litellm.completion(messages=question, stream=True, **common)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole

asked = [{"role": "user", "content": "What is the weather in Paris? Call the function."}]
called = litellm.completion(messages=asked, tools=[weather], tool_choice="required", **common)
(call,) = called.choices[0].message.tool_calls
assert call.function.name == "weather" and json.loads(call.function.arguments)["city"]
answers = [called.choices[0].message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "Sunny"}]
told = litellm.completion(messages=[*asked, *answers], tools=[weather], **common).choices[0].message
assert told.content or told.tool_calls

text = litellm.text_completion(
    prompt="The capital of France is", **{**common, "model": f"text-completion-{common['model']}"}
)
assert text.choices[0].text
assert asyncio.run(litellm.acompletion(messages=question, **common)).choices[0].message.content == whole
