"""aider: a session of two edits in a small repository, the second in another process."""

from __future__ import annotations

import json
import subprocess

from program import MODEL, URL, folder, run, session

source = folder / "greeting.py"
source.write_text('def greet(name):\n    return "Hello, " + name\n')
git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@example.com"]
for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "A greeting"]):
    subprocess.run([*git, *command], check=True)
cached = folder / ".aider" / "caches" / "model_prices_and_context_window.json"  # or it downloads one
cached.parent.mkdir(parents=True)
cached.write_text(json.dumps({f"openai/{MODEL}": {"max_input_tokens": 8192}}))


def edit(message: str, *more: str) -> None:
    run(
        "aider", "--model", f"openai/{MODEL}", "--edit-format", "whole",
        "--yes-always", "--no-auto-commits", "--no-gitignore", "--no-check-update", "--no-show-model-warnings",
        "--analytics-disable", "--no-show-release-notes", "--map-tokens", "512", "--no-pretty", *more,
        "--message", message, "greeting.py", OPENAI_API_BASE=URL, OPENAI_API_KEY="none",
    )  # fmt: skip


session(
    lambda: edit("Add a function farewell(name) that returns 'Goodbye, ' and the name."),
    lambda: edit("Add a docstring to greet.", "--restore-chat-history"),
    cached=0.5,  # the changed file comes before the last messages
)
module: dict[str, object] = {}
exec(compile(source.read_text(), "greeting.py", "exec"), module)
assert module["farewell"]("Ann").startswith("Goodbye"), source.read_text()  # type: ignore[operator]
assert module["greet"]("Ann") == "Hello, Ann"  # type: ignore[operator]
