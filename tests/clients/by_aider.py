"""aider: one edit of a small repository."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

folder = Path(tempfile.mkdtemp())
source = folder / "greeting.py"
source.write_text('def greet(name):\n    return "Hello, " + name\n')
git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@example.com"]
for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "A greeting"]):
    subprocess.run([*git, *command], check=True)
command = [
    str(Path(sys.executable).with_name("aider")), "--model", f"openai/{os.environ['MODEL']}", "--edit-format", "whole",
    "--yes-always", "--no-auto-commits", "--no-gitignore", "--no-check-update", "--no-show-model-warnings",
    "--analytics-disable", "--no-show-release-notes", "--map-tokens", "512", "--no-pretty",
    "--message", "Add a function farewell(name) that returns 'Goodbye, ' and the name.", "greeting.py",
]  # fmt: skip
environment = os.environ | {"OPENAI_API_BASE": os.environ["BASE_URL"], "OPENAI_API_KEY": "none", "HOME": str(folder)}
done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, check=True)
print(done.stdout, done.stderr)
module: dict[str, object] = {}
exec(compile(source.read_text(), "greeting.py", "exec"), module)
assert module["farewell"]("Ann").startswith("Goodbye"), source.read_text()  # type: ignore[operator]
assert module["greet"]("Ann") == "Hello, Ann"  # type: ignore[operator]
