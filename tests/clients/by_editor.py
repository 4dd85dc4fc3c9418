"""An editor's completion: fills in the middle between a prompt and a suffix, streamed."""

from __future__ import annotations

import os

import openai

client = openai.OpenAI(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0)
before, after = "def area(width, height):\n    return ", "\n\n\nprint(area(2, 3))\n"
asked = {"model": os.environ["MODEL"], "prompt": before, "max_tokens": 32, "temperature": 0}
try:
    filled = client.completions.create(suffix=after, **asked)
except openai.BadRequestError as error:
    assert "no fill-in-the-middle tokens" in error.body["message"]  # a model that was not trained for it
else:
    code = filled.choices[0].text
    exec(compile(before + code + after, "area.py", "exec"))
    streamed = client.completions.create(suffix=after, stream=True, **asked)
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == code
