"""Reports of measurements: tables for a terminal or as Markdown, a JSON object, and definitions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from rich.table import Table
from rich.text import Text

from longdraft.metrics import TokenCounts, average, standard_error

ACCEPTED_DEFINITION = (
    "accepted: mean accepted length = new tokens / target forwards, pooled over all prompts, with bonus tokens and "
    "without the prefill's token; ±: one standard error over prompts (jackknife)."
)
SPEED_DEFINITION = "tokens/s: new tokens / decode seconds, without the prefill and its token"
MAX_DEPTH = 1 << 12  # no tree is deeper; bounds the work for a damaged file
Column = tuple[str, str, str]
"""A column of a table: its heading, the key of its figure in a row, and the figure's ``str.format`` pattern."""


@dataclass
class Report:
    """The tables and the JSON object of a measurement.

    Attributes:
        document: the JSON object.
        tables: pairs of a title and a table.
        remarks: lines below the tables.
        definitions: lines below the remarks, which define the figures.
    """

    document: dict[str, Any]
    tables: Sequence[tuple[str, Table]]
    remarks: Sequence[Text] = ()
    definitions: Sequence[str] = ()


def to_markdown(report: Report) -> str:
    """A report's tables, remarks and definitions as Markdown."""
    lines = []
    for title, table in report.tables:
        columns = [[column.header, *column.cells] for column in table.columns]
        header, *rows = [[str(cell).replace("|", "\\|") for cell in row] for row in zip(*columns, strict=True)]
        rule = ["---:" if column.justify == "right" else "---" for column in table.columns]
        lines += [f"**{title}**", "", *(f"| {' | '.join(row)} |" for row in (header, rule, *rows)), ""]
    notes = [*(remark.plain for remark in report.remarks), *report.definitions]
    return "\n".join([*lines, *(f"- {line}" for line in notes), ""])


def new_table(names: Sequence[str], figures: Sequence[str] = ()) -> Table:
    """An empty table: columns of names, and right-aligned columns of figures."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in names:
        table.add_column(heading, no_wrap=True)
    for heading in figures:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def pivot(
    head: str, rows: Sequence[Mapping[str, Any]], column: Callable[[Mapping[str, Any]], str], cell: Callable[..., Any]
) -> Table:
    """A table with a line for each method and a column for each length.

    Args:
        head: heading of the column of methods.
        column: a row -> the heading of its column.
        cell: a row -> the text of its cell.
    """
    headings = list(dict.fromkeys(column(row) for row in rows))
    table = new_table([head], headings)
    for name in dict.fromkeys(row["method"] for row in rows):
        cells = {column(row): cell(row) for row in rows if row["method"] == name}
        table.add_row(Text(name), *(cells.get(heading, "-") for heading in headings))
    return table


def median_of(values: Iterable[float | None]) -> float | None:
    """The median of the values that are not None; None if there are none."""
    numbers = [v for v in values if v is not None]
    return median(numbers) if numbers else None


def mean_of(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are not None; None if there are none."""
    numbers = [v for v in values if v is not None]
    return mean(numbers) if numbers else None


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """The quotient; None if either number is None or the denominator is 0."""
    return None if numerator is None or not denominator else numerator / denominator


def spread(values: Iterable[float | None]) -> list[float] | None:
    """The lowest and the highest of the values that are not None; None if there are none."""
    numbers = [v for v in values if v is not None]
    return [min(numbers), max(numbers)] if numbers else None


def group_by(rows: Iterable[Mapping[str, Any]], *keys: str) -> list[list[Mapping[str, Any]]]:
    """Groups of the rows that agree in these keys, in the order of their first rows."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(groups.values())


def nonempty_columns(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> list[Column]:
    """The columns that have a figure in at least one row."""
    return [column for column in columns if any(row.get(column[1]) is not None for row in rows)]


def format_figure(value: float | str | None, form: str, missing: str = "-") -> str:
    """A value in a ``str.format`` pattern such as ``{:.1f} s``; ``missing`` if it is None."""
    return missing if value is None else form.format(value)


def acceptance_stats(counts: Iterable[TokenCounts]) -> dict[str, Any]:
    """A row's accepted length and standard error; ``prompts``: number of prompts with a verification."""
    verified = [(tokens, verifications) for tokens, verifications in counts if verifications]
    error = standard_error(verified)
    return {"mean_accepted_length": average(verified), "prompts": len(verified), "standard_error": error}


def format_cell(row: Mapping[str, Any], key: str = "mean_accepted_length", form: str = "{:.2f}") -> str:
    """A row's figure as tables show it; an accepted length comes with its standard error."""
    error = row.get("standard_error") if key in ("mean_accepted_length", "accepted") else None
    return format_figure(row.get(key), form) + format_figure(error, " ± {:.2f}", missing="")


def pluralize(number: int, noun: str) -> str:
    """``1 sample``, ``2 samples``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def depth_accepted(rounds: Sequence[tuple[int, int]]) -> list[float]:
    """Share of rounds that accepted at least d drafted tokens, for d = 1, 2, ... up to the most accepted.

    Args:
        rounds: for each round, how many drafted tokens were accepted, and how many ``max_tokens`` allowed.
    """
    deepest = min(MAX_DEPTH, max((accepted for accepted, _ in rounds), default=0))
    levels = range(1, deepest + 1)
    return [sum(accepted >= d for accepted, _ in rounds) / len(rounds) for d in levels]


def environment_info() -> dict[str, Any]:
    """The machine and the versions, for a report's JSON object."""
    from longdraft.bench import machine

    return {"hardware": machine.hardware(), "versions": machine.versions()}
