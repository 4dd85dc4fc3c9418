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


def rotate_pairs(
    names: Iterable[Any], others: Sequence[Any], group_size: int = 1, both: Iterable[Any] = ()
) -> list[Any]:
    """All pairs of names and others. Each name has ``group_size`` fast pairs, in rotation; the others are marked slow.

    Args:
        both: names with fast pairs only.
    """
    both, pairs = list(both), []
    for i, name in enumerate(names):
        quick = {(i * group_size + k) % len(others) for k in range(group_size)}
        for j, other in enumerate(others):
            pairs.append((name, other) if j in quick or name in both else slow(name, other))
    return pairs
