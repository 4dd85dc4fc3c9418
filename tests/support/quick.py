"""Which cases of a matrix run in seconds with the fast tests; the whole matrix is ``slow``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A case that is a slow test."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_except(cases: Iterable[Any], quick: Iterable[Any]) -> list[Any]:
    """All cases; those not in ``quick`` are slow."""
    quick = list(quick)
    return [case if case in quick else slow(case) for case in cases]


def rotate_pairs(names: Iterable[Any], others: Sequence[Any], each: int = 1, both: Iterable[Any] = ()) -> list[Any]:
    """Every name with every other. A name meets ``each`` of the others in turn, the rest of the pairs are slow.

    Args:
        both: names that meet all others.
    """
    both, pairs = list(both), []
    for i, name in enumerate(names):
        quick = {(i * each + k) % len(others) for k in range(each)}
        for j, other in enumerate(others):
            pairs.append((name, other) if j in quick or name in both else slow(name, other))
    return pairs
