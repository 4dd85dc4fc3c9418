"""Claude Code (from npm): an agent that reads a file and edits it, in several turns with calls of tools."""

from __future__ import annotations

import json

from program import MODEL, ROOT, folder, run

source = folder / "greeting.py"
source.write_text('def greet(name):\n    return "Hello, " + name\n')
told = run(
    "claude", "--bare", "--print", "Read greeting.py, then replace Hello by Goodbye in it with Edit.",
    "--tools", "Read,Edit", "--allowedTools", "Read,Edit", "--max-turns", "6", "--no-session-persistence",
    "--system-prompt", "You are a coding agent. Call one tool at a time.", "--output-format", "stream-json", "--verbose",
    ANTHROPIC_BASE_URL=ROOT, ANTHROPIC_API_KEY="none", ANTHROPIC_MODEL=MODEL, ANTHROPIC_DEFAULT_HAIKU_MODEL=MODEL,
    CLAUDE_CODE_MAX_OUTPUT_TOKENS="200", CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1", DISABLE_AUTOUPDATER="1",
    DISABLE_TELEMETRY="1", DISABLE_ERROR_REPORTING="1", API_TIMEOUT_MS="900000",
)  # fmt: skip
events = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
blocks = [block for event in events if event["type"] == "assistant" for block in event["message"]["content"]]
assert any(block["type"] == "tool_use" and block["name"] == "Read" for block in blocks), blocks
assert "Goodbye" in source.read_text(), source.read_text()
assert not any(event.get("error") or event.get("is_error") for event in events if event["type"] == "assistant"), events
