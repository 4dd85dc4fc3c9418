"""A draft folder, examined for ``longdraft doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longdraft.drafters.kinds import kind_of
from longdraft.errors import LongdraftError
from longdraft.host.runner import TargetRunner


def examined(folder: Path, runner: TargetRunner | None, shipped: bool) -> dict[str, Any]:
    """Reads a draft, checks its tensors against its sizes, and it against the target.

    Args:
        runner: the target; None where there is none, and only the folder is checked.
        shipped: it comes with the package: one made for another target is nothing to complain about.

    Returns:
        ``name, shipped, method, parameters, vocabulary, trained_length, fits, reason, remarks``: ``fits`` is None where
        it was not found out, ``reason`` says why the draft cannot be used, ``remarks`` what looks wrong otherwise.
    """
    found: dict[str, Any] = {
        "name": folder.name if shipped else str(folder), "shipped": shipped, "method": None, "parameters": None,
        "vocabulary": None, "trained_length": None, "fits": None, "reason": None, "remarks": [],
    }  # fmt: skip
    try:
        draft = kind_of(folder).load(folder)
    except LongdraftError as error:
        return found | {"fits": False, "reason": str(error)}
    found |= {
        "method": draft.kind,
        "parameters": draft.parameters,
        "vocabulary": draft.vocabulary,
        "trained_length": draft.trained_length,
    }
    if runner is None:
        return found
    try:
        draft.check(runner)
    except LongdraftError as error:
        return found | {"fits": False, "reason": None if shipped else str(error)}
    return found | {"fits": True, "remarks": draft.remarks(runner)}
