"""What was measured on a machine once, kept for later processes in small files, each for one kind of thing."""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from longdraft.folders import cache_folder

logger = logging.getLogger("longdraft")


def file_of(kind: dict[str, Any], name: str, folder: Path | None = None) -> Path:
    """Where what is found for a kind is kept.

    Args:
        name: of what is measured.
        folder: None: in the package's cache.
    """
    digest = hashlib.sha256(json.dumps(kind, sort_keys=True).encode()).hexdigest()[:16]
    return (cache_folder() / name if folder is None else folder) / f"{digest}.json"


def read(file: Path, kind: dict[str, Any], version: int) -> Any:
    """What is kept for a kind; None where nothing is, nothing that can be read, or something of another version."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return found["choice"] if found["format"] == version and found["kind"] == kind else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(file: Path, kind: dict[str, Any], version: int, choice: Any) -> None:
    """Keeps what was found; where that fails, it is found again the next time."""
    temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        content = {"format": version, "kind": kind, "choice": choice}
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        temporary.replace(file)
    except OSError as error:
        logger.info("What was measured cannot be kept in %s: %s", file, error.strerror)
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
