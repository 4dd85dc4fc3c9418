"""Builds reports of measurements: tables for a terminal or as Markdown, a JSON object, and definitions."""

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
MAX_DEPTH = 1 << 12  # deeper than any draft tree: limits the work if a file is damaged
Column = tuple[str, str, str]
"""A column of a table: heading, key of the figure in a row, ``str.format`` pattern of the figure."""


@dataclass
class Report:
    """The tables and the JSON object of a measurement."""

    document: dict[str, Any]  # the JSON object
    tables: Sequence[tuple[str, Table]]  # pairs of a title and a table
    remarks: Sequence[Text] = ()  # lines below the tables
    definitions: Sequence[str] = ()  # definitions of the figures; lines below the remarks


def to_markdown(report: Report) -> str:
    """Returns the tables, remarks and definitions of a report as Markdown."""
    lines = []
    for title, table in report.tables:
        columns = [[column.header, *column.cells] for column in table.columns]
        header, *rows = [[str(cell).replace("|", "\\|") for cell in row] for row in zip(*columns, strict=True)]
        rule = ["---:" if column.justify == "right" else "---" for column in table.columns]
        lines += [f"**{title}**", "", *(f"| {' | '.join(row)} |" for row in (header, rule, *rows)), ""]
    notes = [*(remark.plain for remark in report.remarks), *report.definitions]
    return "\n".join([*lines, *(f"- {line}" for line in notes), ""])


def new_table(name_headings: Sequence[str], figure_headings: Sequence[str] = ()) -> Table:
    """Makes an empty table with columns of names and right-aligned columns of figures."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in name_headings:
        table.add_column(heading, no_wrap=True)
    for heading in figure_headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def pivot(
    first_heading: str,
    rows: Sequence[Mapping[str, Any]],
    make_heading: Callable[[Mapping[str, Any]], str],
    make_cell: Callable[..., Any],
) -> Table:
    """Makes a table with a line for each method and a column for each length."""
    headings = list(dict.fromkeys(make_heading(row) for row in rows))
    table = new_table([first_heading], headings)
    for name in dict.fromkeys(row["method"] for row in rows):
        cells = {make_heading(row): make_cell(row) for row in rows if row["method"] == name}
        table.add_row(Text(name), *(cells.get(heading, "-") for heading in headings))
    return table


def median_of(values: Iterable[float | None]) -> float | None:
    """Returns the median of the values that are not None; None if there are no such values."""
    numbers = [value for value in values if value is not None]
    return median(numbers) if numbers else None


def mean_of(values: Iterable[float | None]) -> float | None:
    """Returns the mean of the values that are not None; None if there are no such values."""
    numbers = [value for value in values if value is not None]
    return mean(numbers) if numbers else None


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Returns the quotient; None if either number is None or the denominator is 0."""
    return None if numerator is None or not denominator else numerator / denominator


def spread(values: Iterable[float | None]) -> list[float] | None:
    """Returns the lowest and the highest of the values that are not None; None if there are no such values."""
    numbers = [value for value in values if value is not None]
    return [min(numbers), max(numbers)] if numbers else None


def group_by(rows: Iterable[Mapping[str, Any]], *keys: str) -> list[list[Mapping[str, Any]]]:
    """Groups rows that have equal values of ``keys``. A group stands where its first row stood."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(groups.values())


def nonempty_columns(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> list[Column]:
    """Returns the columns that have a figure in at least one row."""
    return [column for column in columns if any(row.get(column[1]) is not None for row in rows)]


def format_figure(value: float | str | None, pattern: str, missing: str = "-") -> str:
    """Formats a value by a ``str.format`` pattern such as ``{:.1f} s``; returns ``missing`` if the value is None."""
    return missing if value is None else pattern.format(value)


def acceptance_stats(counts: Iterable[TokenCounts]) -> dict[str, Any]:
    """Returns the mean accepted length, its standard error, and the number of prompts that have a verification."""
    verified = [(tokens, verifications) for tokens, verifications in counts if verifications]
    error = standard_error(verified)
    return {"mean_accepted_length": average(verified), "prompts": len(verified), "standard_error": error}


def format_cell(row: Mapping[str, Any], key: str = "mean_accepted_length", pattern: str = "{:.2f}") -> str:
    """Formats a figure of a row. A mean accepted length is followed by its standard error."""
    error = row.get("standard_error") if key in ("mean_accepted_length", "accepted") else None
    return format_figure(row.get(key), pattern) + format_figure(error, " ± {:.2f}", missing="")


def pluralize(number: int, noun: str) -> str:
    """Returns a number with its noun, such as ``1 sample`` or ``2 samples``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def depth_accepted(rounds: Sequence[tuple[int, int]]) -> list[float]:
    """Returns for d = 1, 2, 3 and so on the share of rounds that accepted at least d drafted tokens.

    Args:
        rounds: for each round, how many drafted tokens were accepted, and how many ``max_tokens`` allowed.
    """
    max_depth = min(MAX_DEPTH, max((accepted for accepted, _ in rounds), default=0))
    depths = range(1, max_depth + 1)
    return [sum(accepted >= depth for accepted, _ in rounds) / len(rounds) for depth in depths]
