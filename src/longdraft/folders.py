"""Where the package keeps what it makes once: an unpacked model, measured costs, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$LONGDRAFT_CACHE, or ``longdraft`` in the platform's cache folder. It need not exist."""
    own = os.environ.get("LONGDRAFT_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "longdraft"
