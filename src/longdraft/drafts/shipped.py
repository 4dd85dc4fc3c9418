"""Trained drafts that come with the package, a folder each, and the choice of one for a target."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longdraft.errors import CheckpointError

FOLDER = Path(__file__).parent
# A target of the same architecture with other weights takes the draft too: output is exact all the same.
_DIGEST = "weights"


def folders() -> list[Path]:
    """The shipped draft folders, by name."""
    return sorted(path.parent for path in FOLDER.glob("*/config.json"))


def fitting(description: Mapping[str, Any], kind: str | None = None) -> Path | None:
    """The shipped draft that fits a target; if several do, one trained with exactly these weights.

    Args:
        description: the target's, as :func:`longdraft.model.shared_parts.describe` returns it.
        kind: the kind of draft ("longspec"); None: any.

    Raises:
        CheckpointError: a shipped draft's config.json is damaged.
    """
    found: list[tuple[bool, Path]] = []
    for folder in folders():
        own, made_for = _described(folder)
        if kind not in (None, own):
            continue
        if made_for and all(description.get(k) == x for k, x in made_for.items() if k != _DIGEST):
            found.append((made_for.get(_DIGEST) == description.get(_DIGEST), folder))
    return max(found, key=lambda f: f[0])[1] if found else None


def _described(folder: Path) -> tuple[str, dict[str, Any]]:
    """A shipped draft's kind and its target's description."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return str(config["drafter"]), dict(config["target"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"The shipped draft {folder} is damaged ({error!r}): install longdraft again.") from error
