"""Whether rounds are planned, and by what."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from longdraft.model.checkpoints import Progress
from longdraft.model.runner import TargetRunner
from longdraft.planning.costs import table_for, wake
from longdraft.planning.planner import Planner

PLANS = ("auto", "fixed")
# Says what is done where nobody asks for a plan.
VARIABLE = "LONGDRAFT_PLAN"
# Options that say what tree there shall be.
_SHAPING = ("widths", "nodes", "tree", "depth", "top_k", "threshold")


def checked(plan: str | None) -> str | None:
    """The plan that was asked for. Raises ValueError for one that there is not."""
    if plan is not None and plan not in PLANS:
        raise ValueError(f"plan must be {' or '.join(PLANS)}, got {plan!r}")
    return plan


def planned(plan: str | None, options: Mapping[str, Any]) -> bool:
    """Whether to plan: as asked, else not where a tree was asked for.

    Raises:
        ValueError: the environment asks for a plan that there is not.
    """
    if plan is None and any(options.get(name) is not None for name in _SHAPING):
        return False
    return (plan or checked(os.environ.get(VARIABLE) or None) or PLANS[0]) == "auto"


def planner_for(runner: TargetRunner, progress: Progress | None = None) -> Planner | None:
    """A planner with what verifications cost on this machine; None where there is no memory to measure it in."""
    table = table_for(runner, progress=progress, seconds=wake(runner))
    return None if table is None else Planner(table)
