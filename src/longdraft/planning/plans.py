"""The choice whether rounds are planned, and the planner of a target."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from longdraft.model.checkpoints import Progress
    from longdraft.model.runner import TargetRunner
    from longdraft.planning.costs import CostTable
    from longdraft.planning.planner import Planner

PLANS = ("auto", "fixed")
# One of these; or seconds of a forward by its rows, which rounds are planned by instead of measured ones.
PlanChoice: TypeAlias = "str | Mapping[int, float] | None"
# Environment variable with the default plan.
PLAN_VARIABLE = "LONGDRAFT_PLAN"
# Options that describe a tree: with one of them, rounds are not planned by default.
_TREE_OPTIONS = ("widths", "nodes", "tree", "depth", "top_k", "threshold")


def check_plan(plan: PlanChoice) -> PlanChoice:
    """Returns the plan; raises ValueError if there is no such plan."""
    if isinstance(plan, Mapping):
        _given(plan)
    elif plan is not None and plan not in PLANS:
        raise ValueError(f"plan must be {' or '.join(PLANS)}, got {plan!r}")
    return plan


def is_planned(plan: PlanChoice, options: Mapping[str, Any], exact: bool = True) -> bool:
    """True if rounds are to be planned: as ``plan`` says; by default, unless the options describe a tree, or the method
    is not ``exact``, so that its text would depend on the clock.

    Raises:
        ValueError: the environment variable names no plan.
    """
    if plan is None and (not exact or any(options.get(name) is not None for name in _TREE_OPTIONS)):
        return False
    return (plan or check_plan(os.environ.get(PLAN_VARIABLE) or None) or PLANS[0]) != "fixed"


def make_planner(plan: PlanChoice, runner: TargetRunner, progress: Progress | None = None) -> Planner | None:
    """Makes a planner with given or measured costs; returns None if there is no memory to measure them in."""
    from longdraft.planning.costs import load_or_measure
    from longdraft.planning.planner import Planner

    if isinstance(plan, Mapping):
        return Planner(_given(plan), use_clock=False)
    table = load_or_measure(runner, progress=progress)
    return None if table is None else Planner(table)


def _given(seconds: Mapping[int, float]) -> CostTable:
    """The table of costs that do not depend on the text's length."""
    from longdraft.planning.costs import CostTable

    return CostTable((0,), tuple(seconds), (tuple(seconds.values()),))
