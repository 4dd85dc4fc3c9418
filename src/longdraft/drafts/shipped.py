"""Trained drafts that come with the package, a folder each, and the choice of one for a target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longdraft.files import read_json, reads

FOLDER = Path(__file__).parent
# A target of the same architecture with other weights takes the draft too: output is exact all the same.
_DIGEST = "weights"


def folders() -> list[Path]:
    """The shipped draft folders, by name."""
    return sorted(path.parent for path in FOLDER.glob("*/config.json"))


def find_draft(description: Mapping[str, Any], kind: str | None = None) -> Path | None:
    """The shipped draft that fits a target; if several do, one trained with exactly these weights.

    Args:
        description: the target's, as :func:`longdraft.model.shared_parts.describe` returns it.
        kind: the kind of draft ("longspec"); None: any.

    Raises:
        CheckpointError: a shipped draft's config.json is damaged.
    """
    found: list[tuple[bool, Path]] = []
    for folder in folders():
        own, required_target = _described(folder)
        if kind not in (None, own):
            continue
        if required_target and all(description.get(k) == x for k, x in required_target.items() if k != _DIGEST):
            found.append((required_target.get(_DIGEST) == description.get(_DIGEST), folder))
    return max(found, key=lambda f: f[0])[1] if found else None


@reads("The shipped draft", "Install longdraft again.")
def _described(folder: Path) -> tuple[str, dict[str, Any]]:
    """A shipped draft's kind and its target's description."""
    config = read_json(folder / "config.json")
    return str(config["drafter"]), dict(config["target"])
