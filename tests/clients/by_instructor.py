"""instructor: structured output through tools, JSON schema and JSON mode; a partial object from a stream."""

from __future__ import annotations

import os

import instructor
from openai import OpenAI
from pydantic import BaseModel


class City(BaseModel):
    name: str
    country: str


common = {"model": os.environ["MODEL"], "temperature": 0, "max_tokens": 64, "max_retries": 0}
asked = [{"role": "user", "content": "Tell me of Paris."}]
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
    client = instructor.from_openai(OpenAI(base_url=os.environ["BASE_URL"], api_key="none"), mode=mode)
    assert client.create(response_model=City, messages=asked, **common).name == "Paris", mode
*_, last = client.create_partial(response_model=City, messages=asked, **common)
assert last.name == "Paris"
