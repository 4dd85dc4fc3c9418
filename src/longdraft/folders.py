"""The folder where the package keeps measured costs and compiled kernels; and names of GGUF files."""

from __future__ import annotations

import logging
import os
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

logger = logging.getLogger("longdraft")


def is_gguf(name: str | os.PathLike[str]) -> bool:
    """True if a name is that of a GGUF file, which need not exist."""
    path = Path(name)
    return path.suffix == ".gguf" and not path.is_dir()


def cache_folder() -> Path:
    """$LONGDRAFT_CACHE, or ``longdraft`` in the user's cache folder. If it is missing, it is made for this user alone.

    For a user without a home directory it is a folder among the temporary files, another one for each process.
    """
    own, shared = os.environ.get("LONGDRAFT_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(own).expanduser() if own else (Path(shared) if shared else Path.home() / ".cache") / "longdraft"
    except RuntimeError:  # no home, as for a container's user without an entry
        return _temporary()
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@cache
def _temporary() -> Path:
    """A private folder of this process."""
    folder = Path(tempfile.mkdtemp(prefix="longdraft-"))
    logger.warning(
        "There is no home directory: the model, kernels and costs are in %s, for this process alone. Set "
        "LONGDRAFT_CACHE to a folder that lasts.",
        folder,
    )
    return folder
