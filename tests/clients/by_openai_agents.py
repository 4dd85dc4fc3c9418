"""OpenAI's Agents SDK: sessions with a tool, whole and streamed, of text and of objects, on both APIs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Literal

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from program import MODEL, URL, session
from pydantic import BaseModel

set_tracing_disabled(True)
called: list[str] = []


class Answer(BaseModel):
    city: Literal["Paris", "Rome"]
    warm: bool


@function_tool
def weather(city: str) -> str:
    """The weather in a city."""
    called.append(city)
    return "Sunny, 21 degrees"


loop = asyncio.new_event_loop()
client = AsyncOpenAI(base_url=URL, api_key="none", max_retries=0, timeout=3600)


async def whole(agent: Agent, memory: SQLiteSession, question: str) -> None:
    assert (await Runner.run(agent, question, session=memory, max_turns=4)).final_output


async def streamed(agent: Agent, memory: SQLiteSession, question: str) -> None:
    result = Runner.run_streamed(agent, question, session=memory, max_turns=4)
    assert [event async for event in result.stream_events()] and result.final_output


def ask(turn: Coroutine[None, None, None]) -> None:
    try:
        loop.run_until_complete(turn)
    except MaxTurnsExceeded:  # small models call again and again
        pass
    except ModelBehaviorError as error:
        assert "max_output_tokens" in str(error)


def talk(agent: Agent) -> None:
    called.clear()
    memory = SQLiteSession("weather")
    session(
        lambda: ask(whole(agent, memory, "What is the weather in Paris?")),
        lambda: ask(streamed(agent, memory, "And in Rome?")),
        lambda: ask(whole(agent, memory, "Which of the two is warmer?")),
    )
    assert len(called) >= 3, called


for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
    for output in (None, Answer):
        agent = Agent(
            name="forecaster",
            instructions="Answer questions about the weather. Call the function, then answer in one short sentence.",
            tools=[weather],
            output_type=output,
            model=kind(MODEL, client),
            model_settings=ModelSettings(tool_choice="required", max_tokens=96, temperature=0),
        )
        talk(agent)
