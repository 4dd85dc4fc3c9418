"""Entry points stand in this package, none of them in the core."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from pathlib import Path

ROOT = Path(__file__).parents[3]
ENTRY = re.compile(r'^longdraft = "(longdraft_engines\S+)"$', re.MULTILINE)


def test_entry_points_lead_to_what_registers_and_the_core_has_none():
    found = ENTRY.findall((ROOT / "packages/longdraft-engines/pyproject.toml").read_text())
    assert len(found) == 1
    assert all(callable(EntryPoint("longdraft", value, "").load()) for value in found)
    assert "entry-points" not in (ROOT / "pyproject.toml").read_text()
