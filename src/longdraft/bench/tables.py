"""What the reports of the bench share: sums over samples, figures as text, and tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from rich.table import Table

from longdraft.bench import machine


def median_of(values: Iterable[float | None]) -> float | None:
    """Of those that there are; None where there are none."""
    known = [v for v in values if v is not None]
    return median(known) if known else None


def ratio(own: float | None, other: float | None) -> float | None:
    """None where one of them is missing, or there is nothing to divide by."""
    return None if own is None or not other else own / other


def figure(value: float | str | None, form: str, missing: str = "-") -> str:
    """A number in a format such as ``{:.1f} s``."""
    return missing if value is None else form.format(value)


def count(number: int, what: str) -> str:
    """``1 sample``, ``2 samples``."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def table(names: Sequence[str], figures: Sequence[str] = ()) -> Table:
    """An empty table: columns of names, and of figures at their right edges."""
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for head in names:
        made.add_column(head, no_wrap=True)
    for head in figures:
        made.add_column(head, justify="right", no_wrap=True)
    return made


def circumstances() -> dict[str, Any]:
    """The machine and the versions of what matters, as each report's JSON object has them."""
    return {"hardware": machine.hardware(), "versions": machine.versions()}
