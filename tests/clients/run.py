"""Runs real clients, as they come from the package index, against ``longdraft serve``.

``make test-clients`` does; ``python -m tests.clients.run openai aider --model FILE`` runs some. Each has an environment
of its own below --folder, which stays for the next time. Prints a table of what worked.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import longdraft
from tests.serve.browser import CHROMIUM

HERE = Path(__file__).parent
# Script -> packages, the client first; none: a program of this machine.
CLIENTS = {
    "browser": [],
    "claude_code": [],
    "openai": ["openai"],
    "anthropic": ["anthropic"],
    "litellm": ["litellm"],
    "langchain": ["langchain-openai"],
    "llama_index": ["llama-index-llms-openai-like"],
    "instructor": ["instructor"],
    "pydantic_ai": ["pydantic-ai-slim[openai]"],
    "llm": ["llm"],
    "aider": ["aider-chat"],
    "editor": ["openai"],
    "lm_eval": ["lm-eval[api]", "transformers"],
    "llama_benchy": ["llama-benchy"],
    "guidellm": ["guidellm"],
    "aiperf": ["aiperf"],
    "inference_perf": ["inference-perf"],
}
# Program -> where it is, and how it comes there.
PROGRAMS = {
    "browser": (CHROMIUM, "Chromium (apt-get install chromium)"),
    "claude_code": (shutil.which("claude"), "Claude Code (npm install -g @anthropic-ai/claude-code)"),
}
NEEDS = {"inference_perf": (3, 12)}  # versions of Python; others take this one


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", default=list(CLIENTS), metavar="CLIENT", help=", ".join(CLIENTS))
    parser.add_argument("--model", help="a file or folder; left out: the embedded model, which fails some questions")
    parser.add_argument("--url", help="a server that runs already, such as http://127.0.0.1:8000")
    parser.add_argument("--folder", type=Path, default=Path(".venv-clients"))
    options = parser.parse_args()
    if unknown := [name for name in options.clients if name not in CLIENTS]:
        parser.error(f"no client {', '.join(unknown)}; there are {', '.join(CLIENTS)}")
    for name in [name for name in options.clients if sys.version_info < NEEDS.get(name, (3, 10))]:
        print(f"{CLIENTS[name][0]} is left out: it needs Python {'.'.join(map(str, NEEDS[name]))}.")
        options.clients.remove(name)
    for name, (found, needed) in PROGRAMS.items():
        if found is None and name in options.clients:
            print(f"{name} is left out: it needs {needed}.")
            options.clients.remove(name)
    options.folder.mkdir(parents=True, exist_ok=True)
    server = None if options.url else serving(options.model, options.folder / "server.log")
    url = options.url or "http://127.0.0.1:8765"
    try:
        wait_for(url, server)
        name = Path(options.model).name if options.model else "SmolLM2-135M-Instruct"
        words = options.folder / "tokenizer"  # for clients that count tokens themselves
        longdraft.load(options.model).tokenizer.save_pretrained(words)
        environment = os.environ | {"BASE_URL": f"{url}/v1", "MODEL": name, "TOKENIZER": str(words.absolute())}
        failed = [client for client in options.clients if not works(client, options.folder, environment)]
    finally:
        if server is not None:
            server.terminate()
            server.wait()
    print(f"{len(options.clients) - len(failed)} passed, {len(failed)} failed")
    if failed and not (options.model or options.url):
        print(
            "The embedded model may have given a wrong answer: SERVED=FILE names another (Qwen2.5-Coder-1.5B passes)."
        )
    return len(failed)


def serving(model: str | None, log: Path) -> subprocess.Popen[bytes]:
    chosen = ["--model", model] if model else []
    command = [sys.executable, "-m", "longdraft", "serve", "--port", "8765", "--context", "8192", *chosen]
    print(f"Starting the server, which writes to {log} ...", flush=True)
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=out)


def wait_for(url: str, server: subprocess.Popen[bytes] | None, seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if server is not None and server.poll() is not None:
            raise SystemExit("The server has ended: see its log.")
        try:
            with urlopen(f"{url}/ready"):
                return
        except URLError:
            time.sleep(1)
    raise SystemExit(f"Nothing answers at {url}.")


def works(client: str, folder: Path, environment: dict[str, str]) -> bool:
    """Installs a client if need be, runs its script, and prints a line of the table."""
    if not CLIENTS[client]:
        return ran(client, Path(sys.executable), Path(str(PROGRAMS[client][0])).name, "", environment)
    python = folder / client / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    if not (folder / client / ".installed").exists():
        print(f"Installing {CLIENTS[client][0]} ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder / client], check=True)
        subprocess.run([*pip, "install", "--quiet", *CLIENTS[client]], check=True)
        (folder / client / ".installed").touch()
    package = CLIENTS[client][0].partition("[")[0]
    shown = subprocess.run([*pip, "show", package], capture_output=True, text=True, check=True).stdout
    version = next(line.split()[1] for line in shown.splitlines() if line.startswith("Version:"))
    return ran(client, python, package, version, environment)


def ran(client: str, python: Path, package: str, version: str, environment: dict[str, str]) -> bool:
    start = time.monotonic()
    done = subprocess.run(
        [python.absolute(), HERE / f"by_{client}.py"], env=environment, capture_output=True, text=True
    )
    outcome = "works" if done.returncode == 0 else "FAILED"
    print(f"{client:14} {package:30} {version:10} {outcome} {time.monotonic() - start:6.0f} s", flush=True)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-4000:])
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
