"""Marks cases of a test matrix as slow, so that the fast tests run a part of it in seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A case that is marked slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_except(cases: Iterable[Any], quick: Iterable[Any]) -> list[Any]:
    """All cases; those that are not in ``quick`` are marked slow."""
    quick = list(quick)
    return [case if case in quick else slow(case) for case in cases]


def rotate_pairs(names: Iterable[Any], others: Sequence[Any], group_size: int = 1) -> list[Any]:
    """All pairs of names and others. Each name has ``group_size`` fast ones, in rotation; the others are slow tests."""
    pairs = []
    for i, name in enumerate(names):
        quick = {(i * group_size + k) % len(others) for k in range(group_size)}
        pairs += [(name, other) if j in quick else slow(name, other) for j, other in enumerate(others)]
    return pairs
