"""What several clients ask: for three colours, for a city as an object, and for the weather by a function."""

from __future__ import annotations

import os
from typing import Any

from pydantic import BaseModel

MODEL, URL = os.environ["MODEL"], os.environ["BASE_URL"]
COLOURS = "Name three colours, with commas between them."
QUESTION = [{"role": "user", "content": COLOURS}]
CITY_QUESTION = [{"role": "user", "content": "Tell me of Paris, in JSON."}]
ASK_WEATHER = [{"role": "user", "content": "What is the weather in Paris? Call the function."}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION: dict[str, Any] = {"name": "weather", "description": "The weather in a city", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}


class City(BaseModel):
    name: str
    country: str


def weather(city: str) -> str:
    """The weather in a city."""
    return "Sunny, 21 degrees"
