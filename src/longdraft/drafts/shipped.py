"""The trained drafts that come with the package, a folder each, and the choice of one for a target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longdraft.files import read_json, reports_file_errors

FOLDER = Path(__file__).parent
# The entry of a target's description that is a digest of the weights. A draft fits other weights too: output is exact.
_DIGEST = "weights"


def folders() -> list[Path]:
    """Returns the shipped draft folders, in the order of their names."""
    return sorted(path.parent for path in FOLDER.glob("*/config.json"))


def find_draft(description: Mapping[str, Any], kind: str | None = None) -> Path | None:
    """Returns the folder of a shipped draft that fits a target, preferably a draft trained with the same weights.
    Raises CheckpointError if a shipped draft's config.json is damaged.

    Args:
        description: the target's description, from :func:`~longdraft.model.shared_parts.describe_target`.
        kind: the kind of draft ("longspec"); None: any.
    """
    candidates: list[tuple[bool, Path]] = []  # (True if the weights are the same, folder)
    for folder in folders():
        draft_kind, required_target = _read_description(folder)
        if kind not in (None, draft_kind):
            continue
        if required_target and all(description.get(k) == x for k, x in required_target.items() if k != _DIGEST):
            candidates.append((required_target.get(_DIGEST) == description.get(_DIGEST), folder))
    return max(candidates, key=lambda candidate: candidate[0])[1] if candidates else None


@reports_file_errors("The shipped draft", "Install longdraft again.")
def _read_description(folder: Path) -> tuple[str, dict[str, Any]]:
    """Reads a shipped draft's kind and its target's description."""
    config = read_json(folder / "config.json")
    return str(config["drafter"]), dict(config["target"])
