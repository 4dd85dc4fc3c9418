"""llm: a prompt, a stream, a schema and a conversation through its file of OpenAI-compatible models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

folder = Path(tempfile.mkdtemp())
(folder / "extra-openai-models.yaml").write_text(
    f"- model_id: served\n  model_name: {os.environ['MODEL']}\n  api_base: {os.environ['BASE_URL']}\n"
    "  supports_schema: true\n  supports_tools: true\n"
)


def llm(*arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("llm")), *arguments]
    environment = os.environ | {"LLM_USER_PATH": str(folder), "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, env=environment, text=True, capture_output=True)
    assert done.returncode == 0 or "Chain limit" in done.stderr, done.stderr  # small models call again and again
    return (done.stdout + done.stderr).strip()


greedy = ("-m", "served", "-o", "temperature", "0", "-o", "max_tokens", "48")
streamed = llm("prompt", "Name three colours.", *greedy)
assert streamed and llm("prompt", "--no-stream", "Name three colours.", *greedy) == streamed
assert llm("prompt", "-c", "And one more?", *greedy)
assert json.loads(llm("prompt", "Tell me of Paris.", "--schema", "name, country", *greedy))["name"] == "Paris"
called = llm("prompt", "What is 17 times 23? Call the function.", *greedy, "--td", "--functions",
             "def times(a: int, b: int) -> int:\n    'Multiplies'\n    return a * b\n")  # fmt: skip
assert "391" in called, called
