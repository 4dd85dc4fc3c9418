"""langchain-openai: a chat, a stream, structured output, a bound tool, a batch."""

from __future__ import annotations

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from questions import COLOURS, MODEL, URL, City, weather

chat = ChatOpenAI(model=MODEL, base_url=URL, api_key="none", temperature=0, max_tokens=48)
whole = chat.invoke(COLOURS)
assert whole.content and whole.usage_metadata["output_tokens"] > 0
assert "".join(chunk.content for chunk in chat.stream(COLOURS)) == whole.content
assert chat.with_structured_output(City).invoke("Tell me of Paris.").name == "Paris"
assert chat.with_structured_output(City, method="function_calling").invoke("Tell me of Paris.").name == "Paris"
(call,) = chat.bind_tools([tool(weather)], tool_choice="weather").invoke("What is the weather in Paris?").tool_calls
assert "aris" in call["args"]["city"]
assert [answer.content for answer in chat.batch([COLOURS, COLOURS])] == [whole.content] * 2
