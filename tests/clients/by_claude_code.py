"""Claude Code (from npm): an agent that reads a file and edits it, in several turns with calls of tools."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from program import MODEL, ROOT, folder, run, session

(folder / "greeting.py").write_text('def greet(name):\n    return "Hello, " + name\n')


def asked(what: str) -> list[dict[str, Any]]:
    """The blocks of the agent's messages until it is done, or the model has said more than it may."""
    try:
        told = run(
            "claude", "--bare", "--print", what, "--tools", "Read,Edit", "--allowedTools", "Read,Edit", "--max-turns",
            "6", "--no-session-persistence", "--system-prompt", "You are a coding agent.", "--output-format",
            "stream-json", "--verbose", ANTHROPIC_BASE_URL=ROOT, ANTHROPIC_API_KEY="none", ANTHROPIC_MODEL=MODEL,
            ANTHROPIC_DEFAULT_HAIKU_MODEL=MODEL, CLAUDE_CODE_MAX_OUTPUT_TOKENS="200", API_TIMEOUT_MS="900000",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1", DISABLE_AUTOUPDATER="1", DISABLE_TELEMETRY="1",
            DISABLE_ERROR_REPORTING="1", CLAUDE_CODE_EXTRA_BODY='{"temperature": 0}',
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        told = error.stdout
    events = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    assert not events[-1]["is_error"] or "output token maximum" in events[-1]["result"], events[-1]
    return [block for event in events if event["type"] == "assistant" for block in event["message"]["content"]]


def reads() -> None:
    blocks = asked("Call Read on greeting.py, then say which function it defines.")
    assert any(block["type"] == "tool_use" and block["name"] == "Read" for block in blocks), blocks
    assert blocks[-1]["type"] == "text", blocks  # what it says of the file is the model's affair


# The second session has the first one's beginning: instructions and tools.
session(reads, lambda: asked("Call Edit on greeting.py: replace Hello by Goodbye."), cached=0.5)
