"""A client that is a program: run against the server in a folder that is its home."""

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
    """Runs a program of this script's environment to a good end; what it says. HTTPS leads it nowhere."""
    command = [str(PROGRAMS / name), *words]
    nowhere = {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "1"}
    env = os.environ | nowhere | {"HOME": str(folder), "PWD": str(folder)} | environment
    done = subprocess.run(command, cwd=folder, env=env, text=True, capture_output=True, stdin=subprocess.DEVNULL)
    print(done.stdout, done.stderr)
    done.check_returncode()
    return done.stdout


def session(*turns: Callable[[], object], kept: float = 0.75) -> None:
    """Runs the turns of a session: the server refuses no request, and has kept most of what the later turns send.

    Args:
        kept: the least share of a later turn's prompts that is not read again.
    """
    for number, turn in enumerate(turns):
        before = counts()
        turn()
        sent, hits, refused = (now - then for now, then in zip(counts(), before, strict=True))
        print(f"turn {number + 1}: {sent:.0f} tokens were sent, of which {hits:.0f} were kept")
        assert sent and not refused, f"{refused:.0f} requests were refused or failed: the server's log names them"
        assert not number or hits >= kept * sent, (hits, sent)


def counts() -> list[float]:
    """Of the server so far: tokens of prompts, those of them that were kept, requests that it refused or that failed
    (not those of clients that went away: 499)."""
    with urlopen(f"{ROOT}/metrics") as answer:
        page = answer.read().decode()
    refused = r'request_failure_total{.*status="(?!499).*}'
    figures = ("prompt_tokens_total{.*}", "prefix_cache_hits_total{.*}", refused)
    return [sum(map(float, re.findall(rf"^longdraft:{figure} (\S+)$", page, re.MULTILINE))) for figure in figures]
