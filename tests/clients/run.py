"""Runs real clients, as published, against ``longdraft serve``.

``make test-clients`` runs all; ``python -m tests.clients.run openai aider --model FILE`` runs some. Each has its own
environment below --folder, which is kept for the next time. Prints a table of results. Clients that this machine or the
model cannot run are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import longdraft

HERE = Path(__file__).parent
# Script -> Python packages, the client first.
CLIENTS = {
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
    "openai_agents": ["openai-agents"],
}
# Script -> npm packages.
NODE = {
    "ai_sdk": ["ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai", "zod"],
    "claude_code": ["@anthropic-ai/claude-code"],
    "codex": ["@openai/codex"],
    "opencode": ["opencode-ai"],
    "qwen_code": ["@qwen-code/qwen-code"],
}
PACKAGES = CLIENTS | NODE
LONG = {"codex", "opencode", "qwen_code"}  # their own instructions have 6,000 to 17,000 tokens
MIN_PYTHON = {"inference_perf": (3, 12)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", default=list(PACKAGES), metavar="CLIENT", help=", ".join(PACKAGES))
    parser.add_argument("--model", help="a file or folder; left out: the embedded model, which fails some questions")
    parser.add_argument("--url", help="a server that runs already, such as http://127.0.0.1:8000")
    parser.add_argument("--folder", type=Path, default=Path(".venv-clients"))
    options = parser.parse_args()
    if unknown := [name for name in options.clients if name not in PACKAGES]:
        parser.error(f"no client {', '.join(unknown)}; there are {', '.join(PACKAGES)}")
    embedded = not (options.model or options.url)
    missing = {name: missing_requirement(name, embedded) for name in options.clients}
    for name in [name for name in options.clients if missing[name]]:
        print(f"{name} is left out: it needs {missing[name]}.")
        options.clients.remove(name)
    options.folder.mkdir(parents=True, exist_ok=True)
    server = None if options.url else start_server(options.model, options.folder / "server.log")
    url = options.url or "http://127.0.0.1:8765"
    try:
        wait_for(url, server)
        name = Path(options.model).name if options.model else "SmolLM2-135M-Instruct"
        tokenizer = options.folder / "tokenizer"  # for clients that count tokens themselves
        longdraft.load(options.model).tokenizer.save_pretrained(tokenizer)
        environment = os.environ | {"BASE_URL": f"{url}/v1", "MODEL": name, "TOKENIZER": str(tokenizer.absolute())}
        failed = [client for client in options.clients if not check_client(client, options.folder, environment)]
    finally:
        if server is not None:
            server.terminate()
            server.wait()
    print(f"{len(options.clients) - len(failed)} passed, {len(failed)} failed")
    if failed and embedded:
        print(
            "The embedded model may have given a wrong answer: SERVED=FILE names another (Qwen2.5-Coder-1.5B passes)."
        )
    return len(failed)


def missing_requirement(client: str, embedded: bool) -> str | None:
    """What a client needs that this machine, or the embedded model, does not have."""
    if sys.version_info < (version := MIN_PYTHON.get(client, (3, 10))):
        return f"Python {'.'.join(map(str, version))}"
    if client in NODE and not (shutil.which("node") and shutil.which("npm")):
        return "Node.js and npm (apt-get install npm)"
    return "a model with 32K of context (SERVED=FILE, --model FILE)" if client in LONG and embedded else None


def start_server(model: str | None, log: Path) -> subprocess.Popen[bytes]:
    flags = ["--context", "32768", "--slots", "2", "--model", model] if model else ["--context", "8192"]
    command = [sys.executable, "-m", "longdraft", "serve", "--port", "8765", *flags]
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


def check_client(client: str, folder: Path, environment: dict[str, str]) -> bool:
    """Installs a client if necessary, and runs its script. Returns whether it succeeded."""
    home, package = (folder / client).absolute(), PACKAGES[client][0].partition("[")[0]
    if not (home / ".installed").exists():
        print(f"Installing {package} ...", flush=True)
        install = install_with_npm if client in NODE else install_with_pip
        install(home, PACKAGES[client])
        (home / ".installed").touch()
    if client in NODE:
        version = json.loads((home / "node_modules" / package / "package.json").read_text())["version"]
        programs = {"PROGRAMS": str(home / "node_modules" / ".bin")}
        return run_script(client, Path(sys.executable), package, version, environment | programs)
    python = home / "bin" / "python"
    shown = subprocess.run([python, "-m", "pip", "show", package], capture_output=True, text=True, check=True).stdout
    version = next(line.split()[1] for line in shown.splitlines() if line.startswith("Version:"))
    return run_script(client, python, package, version, environment | {"PROGRAMS": str(python.parent)})


def install_with_pip(home: Path, packages: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    pip = [home / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", *packages], check=True)


def install_with_npm(home: Path, packages: list[str]) -> None:
    home.mkdir(exist_ok=True)
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--no-update-notifier", "--prefix", str(home)]
    subprocess.run([*command, *packages], check=True)


def run_script(client: str, python: Path, package: str, version: str, environment: dict[str, str]) -> bool:
    """Runs a client's script, and prints a line of the table."""
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
