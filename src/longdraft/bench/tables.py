"""Shared parts of the bench's reports: sums over samples, figures as text, tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, median
from typing import Any

from rich.table import Table

Column = tuple[str, str, str]
"""A column of a table: its heading, the row's key, and a format."""


def median_of(values: Iterable[float | None]) -> float | None:
    """The median of the values that are not None; None if there are none."""
    known = [v for v in values if v is not None]
    return median(known) if known else None


def mean_of(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are not None; None if there are none."""
    known = [v for v in values if v is not None]
    return mean(known) if known else None


def ratio(own: float | None, other: float | None) -> float | None:
    """None if one of them is missing, or the other is 0."""
    return None if own is None or not other else own / other


def filled(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> list[Column]:
    """The columns that have a figure in any row."""
    return [column for column in columns if any(row.get(column[1]) is not None for row in rows)]


def figure(value: float | str | None, form: str, missing: str = "-") -> str:
    """A number in a format such as ``{:.1f} s``."""
    return missing if value is None else form.format(value)


def count(number: int, what: str) -> str:
    """``1 sample``, ``2 samples``."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def depth_accepted(rounds: Sequence[tuple[int, int]]) -> list[float]:
    """Share of rounds that accepted at least d drafted tokens, for d from 1 to the deepest.

    Args:
        rounds: for each, drafted tokens that it accepted, and how many the token budget had room for.
    """
    levels = range(1, max((accepted for accepted, _ in rounds), default=0) + 1)
    return [sum(accepted >= d for accepted, _ in rounds) / len(rounds) for d in levels]


def table(names: Sequence[str], figures: Sequence[str] = ()) -> Table:
    """An empty table: columns of names, and right-aligned columns of figures."""
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for head in names:
        made.add_column(head, no_wrap=True)
    for head in figures:
        made.add_column(head, justify="right", no_wrap=True)
    return made


def circumstances() -> dict[str, Any]:
    """The machine and the versions, for a report's JSON object."""
    from longdraft.bench import machine

    return {"hardware": machine.hardware(), "versions": machine.versions()}
