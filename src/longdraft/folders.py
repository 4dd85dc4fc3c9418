"""Finds the cache folder (measured costs, compiled kernels), and recognizes names of GGUF files."""

from __future__ import annotations

import logging
import os
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

logger = logging.getLogger("longdraft")


def is_gguf(name: str | os.PathLike[str]) -> bool:
    """True if a name ends in .gguf and is not the name of a folder. The file need not exist."""
    path = Path(name)
    return path.suffix == ".gguf" and not path.is_dir()


def cache_folder() -> Path:
    """Returns $LONGDRAFT_CACHE, or ``longdraft`` in the user's cache folder; creates it with mode 700 if missing.

    A process without a home directory gets a temporary folder.
    """
    custom, xdg = os.environ.get("LONGDRAFT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(custom).expanduser() if custom else (Path(xdg) if xdg else Path.home() / ".cache") / "longdraft"
    except RuntimeError:  # no home, as for a container's user that has no passwd entry
        return _temporary_folder()
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@cache
def _temporary_folder() -> Path:
    """Makes a temporary folder for this process, once."""
    folder = Path(tempfile.mkdtemp(prefix="longdraft-"))
    logger.warning(
        "There is no home directory: the model, kernels and costs are in %s, for this process alone. Set "
        "LONGDRAFT_CACHE to a folder that lasts.",
        folder,
    )
    return folder
