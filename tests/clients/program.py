"""Runs a client that is a program against the server, in a folder that is its home."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

MODEL, URL, TOKENIZER = (os.environ[name] for name in ("MODEL", "BASE_URL", "TOKENIZER"))
ROOT = URL.removesuffix("/v1")
PROGRAMS = Path(os.environ["PROGRAMS"])  # of the client's environment
folder = Path(tempfile.mkdtemp())


def run(name: str, *words: str, **environment: str) -> str:
    """Runs a program of the client's environment, without access to HTTPS. It must succeed. Returns its output."""
    command = [str(PROGRAMS / name), *words]
    nowhere = {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "1"}
    env = os.environ | nowhere | {"HOME": str(folder), "PWD": str(folder)} | environment
    done = subprocess.run(command, cwd=folder, env=env, text=True, capture_output=True, stdin=subprocess.DEVNULL)
    print(done.stdout, done.stderr)
    done.check_returncode()
    return done.stdout


def session(*turns: Callable[[], object], cached: float = 0.75) -> None:
    """Runs the turns of a session. The server must refuse no request, and find most of later prompts in its cache.

    Args:
        cached: minimum fraction of a later turn's prompt tokens that are cache hits.
    """
    for number, turn in enumerate(turns):
        before = counters()
        turn()
        sent, hits, failed = (now - then for now, then in zip(counters(), before, strict=True))
        print(f"turn {number + 1}: {sent:.0f} tokens were sent, {hits:.0f} of them cached")
        assert sent and not failed, f"{failed:.0f} requests were refused or failed: the server's log names them"
        assert not number or hits >= cached * sent, (hits, sent)


def counters() -> list[float]:
    """The server's counts of prompt tokens, cache hits, and failed requests (without 499: the client went away)."""
    with urlopen(f"{ROOT}/metrics") as answer:
        page = answer.read().decode()
    failures = r'request_failure_total{.*status="(?!499).*}'
    metrics = ("prompt_tokens_total{.*}", "prefix_cache_hits_total{.*}", failures)
    return [sum(map(float, re.findall(rf"^longdraft:{metric} (\S+)$", page, re.MULTILINE))) for metric in metrics]
