"""llama-index: a chat, a stream, a completion, a tool call."""

from __future__ import annotations

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from questions import COLOURS, MODEL, URL, weather

llm = OpenAILike(
    model=MODEL, api_base=URL, api_key="none", is_chat_model=True, is_function_calling_model=True, temperature=0,
    max_tokens=48,
)  # fmt: skip
question = [ChatMessage(role="user", content=COLOURS)]
whole = llm.chat(question).message.content
assert whole
assert "".join(chunk.delta or "" for chunk in llm.stream_chat(question)) == whole
assert llm.complete("Name a colour.").text
called = llm.chat_with_tools([FunctionTool.from_defaults(weather)], "What is the weather in Paris?", tool_required=True)
(call,) = llm.get_tool_calls_from_response(called)
assert call.tool_name == "weather" and "aris" in call.tool_kwargs["city"]
