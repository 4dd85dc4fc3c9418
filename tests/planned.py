"""Planned runs that do not hang on how busy the machine is: verifications take what a table says, drafting no time."""

from __future__ import annotations

import time
from typing import Any

import pytest

from longdraft.drafters.self_drafter import SelfDrafter
from longdraft.engine.schedule import Schedule
from longdraft.model.runner import TargetRunner
from longdraft.planning import costs
from longdraft.planning.costs import CostTable


def draft_without_knowing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's own drafts are tried as others are, not only where texts are so long that they must pay."""
    monkeypatch.setattr(SelfDrafter, "rows_read", lambda self, length: None)


def given_table(monkeypatch: pytest.MonkeyPatch, table: CostTable | None) -> list[TargetRunner]:
    """Planners take this table for measured; the result holds the runners that they asked for one."""
    asked: list[TargetRunner] = []
    monkeypatch.setattr(costs, "table_for", lambda runner, *_, **__: asked.append(runner) or table)
    return asked


def use_costs(monkeypatch: pytest.MonkeyPatch, table: CostTable | None) -> None:
    """Planners take this table for measured, and a clock agrees with it.

    Args:
        table: of one length of text; None: nothing could be measured, so nothing is planned.
    """
    given_table(monkeypatch, table)
    if table is None:
        return
    now, forward = [0.0], Schedule.forward

    def timed(self: Schedule, trees: list[Any], *arguments: Any, **options: Any) -> Any:
        now[0] += table.at(max(tree.size for tree in trees) * len(trees), 0)
        return forward(self, trees, *arguments, **options)

    monkeypatch.setattr(Schedule, "forward", timed)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
