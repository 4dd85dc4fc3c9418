"""aider: one edit of a small repository."""

from __future__ import annotations

import subprocess

from program import MODEL, URL, folder, run

source = folder / "greeting.py"
source.write_text('def greet(name):\n    return "Hello, " + name\n')
git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@example.com"]
for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "A greeting"]):
    subprocess.run([*git, *command], check=True)
run(
    "aider", "--model", f"openai/{MODEL}", "--edit-format", "whole",
    "--yes-always", "--no-auto-commits", "--no-gitignore", "--no-check-update", "--no-show-model-warnings",
    "--analytics-disable", "--no-show-release-notes", "--map-tokens", "512", "--no-pretty",
    "--message", "Add a function farewell(name) that returns 'Goodbye, ' and the name.", "greeting.py",
    OPENAI_API_BASE=URL, OPENAI_API_KEY="none",
)  # fmt: skip
module: dict[str, object] = {}
exec(compile(source.read_text(), "greeting.py", "exec"), module)
assert module["farewell"]("Ann").startswith("Goodbye"), source.read_text()  # type: ignore[operator]
assert module["greet"]("Ann") == "Hello, Ann"  # type: ignore[operator]
