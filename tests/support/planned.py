"""Costs that nothing has measured."""

from __future__ import annotations

import pytest

from longdraft.planning import costs
from longdraft.planning.costs import CostTable


def given_table(monkeypatch: pytest.MonkeyPatch, table: CostTable | None) -> None:
    """Planners take this table for measured, where nobody can hand it over; elsewhere it is a plan."""
    monkeypatch.setattr(costs, "table_for", lambda *_, **__: table)
