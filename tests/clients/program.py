"""A client that is a program: run against the server in a folder that is its home."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

MODEL, URL, TOKENIZER = (os.environ[name] for name in ("MODEL", "BASE_URL", "TOKENIZER"))
ROOT = URL.removesuffix("/v1")
folder = Path(tempfile.mkdtemp())


def run(name: str, *words: str, **environment: str) -> str:
    """Runs a program of this script's environment, or of this machine, to a good end; what it says."""
    own = Path(sys.executable).with_name(name)
    command = [str(own) if own.exists() else name, *words]
    env = os.environ | {"HOME": str(folder), "HF_HUB_OFFLINE": "1"} | environment
    done = subprocess.run(command, cwd=folder, env=env, text=True, capture_output=True)
    print(done.stdout, done.stderr)
    done.check_returncode()
    return done.stdout
