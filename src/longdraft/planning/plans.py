"""The option ``plan``: decides whether rounds are planned."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from longdraft.planning.costs import CostTable

PLANS = ("auto", "fixed")
# One of PLANS ("fixed": no planning), or costs to plan by, {number of tokens: seconds of a forward}; None: the default.
PlanChoice: TypeAlias = "str | Mapping[int, float] | None"
# Environment variable with the default plan.
PLAN_VARIABLE = "LONGDRAFT_PLAN"
# Options that shape a tree. With one of them, rounds are not planned by default.
_TREE_OPTIONS = ("widths", "nodes", "tree", "depth", "top_k", "threshold")


def check_plan(plan: PlanChoice) -> PlanChoice:
    """Returns ``plan``; raises ValueError if ``plan`` is not valid."""
    if isinstance(plan, Mapping):
        constant_table(plan)
    elif plan is not None and plan not in PLANS:
        raise ValueError(f"plan must be {' or '.join(PLANS)}, got {plan!r}")
    return plan


def is_planned(plan: PlanChoice, options: Mapping[str, Any], exact: bool = True) -> bool:
    """Returns whether to plan rounds. By default yes, unless the options shape a tree or the method is not exact.

    Args:
        options: the method's options.
        exact: the output does not depend on the drafts. A plan by measured times would make other output vary.

    Raises:
        ValueError: the environment variable is not a valid plan.
    """
    if plan is None and (not exact or any(options.get(name) is not None for name in _TREE_OPTIONS)):
        return False
    return (plan or check_plan(os.environ.get(PLAN_VARIABLE) or None) or PLANS[0]) != "fixed"


def constant_table(seconds: Mapping[int, float]) -> CostTable:
    """Makes a table of costs that do not depend on the KV length."""
    from longdraft.planning.costs import CostTable

    return CostTable((0,), tuple(seconds), (tuple(seconds.values()),))
