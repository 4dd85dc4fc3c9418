"""Greedy texts of eight prompts from a running SGLang server, and the comparison of two such files.

Called by sglang_gpu.sh: PORT TOKENS PID OUT.json, or --compare PLAIN.json LONGSPEC.json.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE = Path(textwrap.__file__).read_text()
PROMPTS = [SOURCE[: 1000 * n] for n in (2, 4, 8, 12)] + [
    "The capital of France is", "def fibonacci(n):\n", "Once upon a time", "1, 2, 3, 4,",
]  # fmt: skip
MINUTES = 10


def post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def wait(port: str, server: int) -> None:
    """Until the server answers; raises SystemExit where it has ended or takes too long."""
    until = time.monotonic() + 60 * MINUTES
    while time.monotonic() < until:
        os.kill(server, 0)  # raises where it has ended
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(2)
    raise SystemExit(f"no answer in {MINUTES} minutes")


def collect(port: str, tokens: str, server: str, out: str) -> None:
    wait(port, int(server))
    settings = {"temperature": 0, "max_new_tokens": int(tokens), "ignore_eos": True}

    def one(prompt: str) -> dict:
        return post(f"http://127.0.0.1:{port}/generate", {"text": prompt, "sampling_params": settings})

    with ThreadPoolExecutor(len(PROMPTS)) as together:
        Path(out).write_text(json.dumps(list(together.map(one, PROMPTS))))


def compare(plain: str, longspec: str) -> int:
    """Prints a line a prompt; 1 where a text differs."""
    pairs = list(zip(*(json.loads(Path(name).read_text()) for name in (plain, longspec)), strict=True))
    different = 0
    for i, (one, other) in enumerate(pairs):
        meta = other["meta_info"]
        rounds = meta.get("spec_verify_ct") or 0
        length = f"{meta['completion_tokens'] / rounds:.2f} tokens a step" if rounds else "nothing was drafted"
        same = one["text"] == other["text"]
        different += not same
        print(f"prompt {i}: {'equal' if same else 'DIFFERENT'}, {length}")
    print(f"{len(pairs) - different} of {len(pairs)} texts equal")
    return int(different > 0)


if __name__ == "__main__":
    if sys.argv[1] == "--compare":
        raise SystemExit(compare(*sys.argv[2:]))
    collect(*sys.argv[1:])
