"""The record of what a run was made with: ``train_command.txt``, named and laid out as `speculators` does.

Comment lines say when, the commit, the number of processes, versions of packages and all settings; then follows the
command. It lies in a run's folder, in each of its checkpoints, and beside each draft that it saves.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import longdraft
from longdraft.drafts.hub import COMMAND
from longdraft.files import replacing

PACKAGES = ("torch", "transformers", "accelerate", "safetensors")


def train_command(settings: Mapping[str, Any], processes: int) -> str:
    """The record of this process's run."""
    # The second revision fails where the package only lies inside somebody's repository.
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD", f"HEAD:./{Path(__file__).name}"]
    try:
        commit = subprocess.run(words, capture_output=True, text=True, check=True, timeout=10).stdout.split()[0]
    except (OSError, subprocess.SubprocessError):
        commit = "unknown"  # it was installed
    lines = {"Timestamp": datetime.now(timezone.utc).isoformat(), "Git SHA": commit, "World size": processes}
    lines |= {"longdraft": longdraft.__version__} | {package: version(package) for package in PACKAGES}
    lines |= {"Settings": json.dumps(settings)}
    return "".join(f"# {name}: {value}\n" for name, value in lines.items()) + f"{shlex.join(sys.argv)}\n"


def write(folder: Path, record: str) -> None:
    """Writes a record to a folder. Raises CheckpointError if it cannot be written."""
    with replacing(folder / COMMAND) as part:
        part.write_text(record, encoding="utf-8")
