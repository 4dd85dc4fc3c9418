"""Pydantic AI: an agent that answers, one that calls a tool, one with structured output, a stream."""

from __future__ import annotations

import asyncio

from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from questions import COLOURS, MODEL, URL, City
from questions import weather as answer

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key="none"))
settings = {"temperature": 0, "max_tokens": 96}


assert Agent(model, model_settings=settings).run_sync(COLOURS).output
assert Agent(model, output_type=City, model_settings=settings).run_sync("Tell me of Paris.").output.name == "Paris"
native = Agent(model, output_type=NativeOutput(City), model_settings=settings)
assert native.run_sync("Tell me of Paris.").output.name == "Paris"

with_tool = Agent(model, model_settings=settings, instructions="Call the function for the weather, then answer.")
asked: list[str] = []


@with_tool.tool_plain
def weather(city: str) -> str:
    """The weather in a city."""
    asked.append(city)
    return answer(city)


assert with_tool.run_sync("What is the weather in Paris?").output and asked, asked


async def streamed() -> str:
    async with Agent(model, model_settings=settings).run_stream(COLOURS) as result:
        return "".join([text async for text in result.stream_text(delta=True)])


assert asyncio.run(streamed())
