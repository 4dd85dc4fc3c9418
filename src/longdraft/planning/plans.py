"""The choice whether rounds are planned, and the planner of a target."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longdraft.model.checkpoints import Progress
    from longdraft.model.runner import TargetRunner
    from longdraft.planning.planner import Planner

PLANS = ("auto", "fixed")
# Environment variable with the default plan.
VARIABLE = "LONGDRAFT_PLAN"
# Options that describe a tree: with one of them, rounds are not planned by default.
_TREE_OPTIONS = ("widths", "nodes", "tree", "depth", "top_k", "threshold")


def checked(plan: str | None) -> str | None:
    """Returns the plan; raises ValueError if there is no such plan."""
    if plan is not None and plan not in PLANS:
        raise ValueError(f"plan must be {' or '.join(PLANS)}, got {plan!r}")
    return plan


def planned(plan: str | None, options: Mapping[str, Any], exact: bool = True) -> bool:
    """True if rounds are to be planned: as ``plan`` says; by default, unless the options describe a tree, or the method
    is not ``exact``, so that its text would depend on the clock.

    Raises:
        ValueError: the environment variable names no plan.
    """
    if plan is None and (not exact or any(options.get(name) is not None for name in _TREE_OPTIONS)):
        return False
    return (plan or checked(os.environ.get(VARIABLE) or None) or PLANS[0]) == "auto"


def planner_for(runner: TargetRunner, progress: Progress | None = None) -> Planner | None:
    """Makes a planner with measured costs; returns None if there is no memory to measure them in."""
    from longdraft.planning.costs import table_for, wake
    from longdraft.planning.planner import Planner

    table = table_for(runner, progress=progress, seconds=wake(runner))
    return None if table is None else Planner(table)
