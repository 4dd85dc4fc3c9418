"""Entry points stand in this package, none of them in the core; the names of earlier versions are refused."""

from __future__ import annotations

import importlib
import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ENTRY = re.compile(r'^longdraft = "(longdraft_engines\S+)"$', re.MULTILINE)


def test_entry_points_lead_to_what_registers_and_the_core_has_none():
    found = ENTRY.findall((ROOT / "packages/longdraft-engines/pyproject.toml").read_text())
    assert len(found) == 1
    assert all(callable(EntryPoint("longdraft", value, "").load()) for value in found)
    assert "entry-points" not in (ROOT / "pyproject.toml").read_text()


def test_names_of_earlier_versions_say_where_it_is_now():
    with pytest.raises(ImportError, match=r"longdraft_engines\.vllm"):
        importlib.import_module("longdraft.plugins.vllm")
