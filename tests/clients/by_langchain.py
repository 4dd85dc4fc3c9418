"""langchain-openai: a chat, a stream, structured output, a bound tool, a batch."""

from __future__ import annotations

import os

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

chat = ChatOpenAI(
    model=os.environ["MODEL"], base_url=os.environ["BASE_URL"], api_key="none", temperature=0, max_tokens=48
)


class City(BaseModel):
    name: str
    country: str


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return "Sunny"


question = "Name three colours, with commas between them."
whole = chat.invoke(question)
assert whole.content and whole.usage_metadata["output_tokens"] > 0
assert "".join(chunk.content for chunk in chat.stream(question)) == whole.content
assert chat.with_structured_output(City).invoke("Tell me of Paris.").name == "Paris"
assert chat.with_structured_output(City, method="function_calling").invoke("Tell me of Paris.").name == "Paris"
(call,) = chat.bind_tools([weather], tool_choice="weather").invoke("What is the weather in Paris?").tool_calls
assert "aris" in call["args"]["city"]
assert [answer.content for answer in chat.batch([question, question])] == [whole.content] * 2
