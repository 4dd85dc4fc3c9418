"""instructor: structured output through tools, JSON schema and JSON mode; a partial object from a stream."""

from __future__ import annotations

import instructor
from openai import OpenAI
from questions import MODEL, URL, City

common = {"model": MODEL, "temperature": 0, "max_tokens": 64, "max_retries": 0}
asked = [{"role": "user", "content": "Tell me of Paris."}]
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
    client = instructor.from_openai(OpenAI(base_url=URL, api_key="none"), mode=mode)
    assert client.create(response_model=City, messages=asked, **common).name == "Paris", mode
*_, last = client.create_partial(response_model=City, messages=asked, **common)
assert last.name == "Paris"
