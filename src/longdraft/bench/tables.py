"""Shared parts of the bench's reports: sums over samples, figures as text, tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.table import Table

from longdraft.bench import machine

Column = tuple[str, str, str]
"""A column of a table: its heading, the row's key, and a format."""


def median_of(values: Iterable[float | None]) -> float | None:
    """Over the values that are not None; None if there are none."""
    known = [v for v in values if v is not None]
    return median(known) if known else None


def ratio(own: float | None, other: float | None) -> float | None:
    """None if one of them is missing, or the other is 0."""
    return None if own is None or not other else own / other


# Speed-ups this close to 1 are neither a win nor a loss: the same method run twice differs by as much.
LEVEL = 0.02


@dataclass(frozen=True)
class Tally:
    """Counts of prompts on which a method is faster than another, and slower, which a mean would hide.

    Attributes:
        ratios: tokens/s over the other's, of each prompt (batch); not empty.
    """

    ratios: Sequence[float]

    @property
    def faster(self) -> int:
        return sum(x > 1 + LEVEL for x in self.ratios)

    @property
    def slower(self) -> int:
        return sum(x < 1 - LEVEL for x in self.ratios)

    @property
    def ends(self) -> list[float]:
        """The smallest and the largest."""
        return [min(self.ratios), max(self.ratios)]

    @property
    def median(self) -> float:
        return median(self.ratios)


def tally(ratios: Iterable[float | None]) -> Tally | None:
    """Over the values that are not None; None if there are none."""
    known = [x for x in ratios if x is not None]
    return Tally(known) if known else None


def filled(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> list[Column]:
    """The columns that have a figure in any row."""
    return [column for column in columns if any(row.get(column[1]) is not None for row in rows)]


def figure(value: float | str | None, form: str, missing: str = "-") -> str:
    """A number in a format such as ``{:.1f} s``."""
    return missing if value is None else form.format(value)


def count(number: int, what: str) -> str:
    """``1 sample``, ``2 samples``."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


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
    return {"hardware": machine.hardware(), "versions": machine.versions()}
