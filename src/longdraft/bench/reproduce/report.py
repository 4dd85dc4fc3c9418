"""A table with the paper's rows beside ours: JSON, tables for people, a chart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from rich.table import Table as RichTable
from rich.text import Text

from longdraft.bench import charts
from longdraft.bench.acceptance import called
from longdraft.bench.papers.table import FIGURES, Column, Kind, Table
from longdraft.bench.reproduce.run import Reproduction
from longdraft.bench.reproduce.scaled import Cell
from longdraft.bench.tables import Report, circumstances, figure, table

# Columns of figures beside each other.
WIDE = 8


def shown(made: Reproduction, cells: Sequence[Cell], complete: bool) -> Report:
    """The report of a paper's table.

    Args:
        complete: no unit is missing.
    """
    own = made.scaled.table
    return Report(
        _document(made, cells, complete),
        _tables(made, cells),
        [Text(line) for line in _remarks(made, cells)],
        _definitions(own),
        {"figure": partial(_chart, made, cells)} if cells else {},
        f"{own.heading} of {made.paper.name}",
    )


def _document(made: Reproduction, cells: Sequence[Cell], complete: bool) -> dict[str, Any]:
    """The table as one JSON object, with the keys that docs/figures.md defines."""
    own = made.scaled.table
    return {
        "paper": made.paper.name,
        "reference": made.paper.reference,
        "table": own.name,
        "title": own.title,
        "scale": made.header["scale"],
        "model": made.header["model"]["name"],
        "figures": list(own.shown),
        "rows": [_row(own, cell) for cell in cells],
        "differs": _differs(made),
        "remarks": list(own.remarks),
        "notes": list(made.measuring.notes),
        **circumstances(),
        "complete": complete,
    }


def _row(own: Table, cell: Cell) -> dict[str, Any]:
    beside: dict[str, dict[str, Any]] = {}
    for (model, line, column, key), value in own.published.items():
        # The papers' figures in numbers are of the table's first temperature.
        if (line, column, own.temperatures[0]) == (cell.line.name, cell.column.name, cell.temperature):
            beside.setdefault(model, {"model": model})[key] = value
    return {
        "line": cell.line.name,
        "column": cell.column.name,
        "temperature": cell.temperature,
        **cell.row,
        "as_published": dict(cell.shown),
        "published": list(beside.values()),
        "differs": list(cell.differs),
    }


def _differs(made: Reproduction) -> list[str]:
    """Differences from the paper in all rows."""
    own, model, hardware = made.scaled.table, made.header["model"], made.header["hardware"]
    gpus = ", ".join(gpu["name"] for gpu in hardware["gpus"]) if model["device"] == "cuda" else ""
    return [
        f"model: {model['name']} (paper: {own.models})",
        f"hardware: {gpus or '{cores} cores of {cpu}'.format(**hardware)} (paper: {own.hardware})",
        *made.scaled.differs(),
    ]


def _definitions(own: Table) -> list[str]:
    """Definitions of the figures, where the paper's are not this package's."""
    found = ["Definitions are the paper's; --json has this package's too (docs/figures.md)."]
    if "accepted" in own.figures:
        counted = "counts" if own.bonus else "does not count"
        found.append(f"accepted length: the paper {counted} the bonus token, and ours is shown as the paper counts.")
    if own.kind is Kind.speed and not own.profiled:
        over = own.baseline if own.baseline != "hf-eager" else "transformers' generate with eager attention"
        prefill = "with the prompt's reading" if own.prefill else "without the prompt's reading"
        found.append(f"tokens/s and speed-ups: {prefill}; speed-ups are over {over}.")
    return found


def _tables(made: Reproduction, cells: Sequence[Cell]) -> list[tuple[str, RichTable]]:
    """A title and a table for each temperature, figure and group of columns."""
    own, found = made.scaled.table, []
    for t in dict.fromkeys(cell.temperature for cell in cells):
        for key in own.shown:
            title = f"{own.heading} of {made.paper.name}: {FIGURES[key][0]}, {called(t)}"
            shown = (_table(own, key, t, columns, cells) for columns in _grouped(own.columns))
            found += [(title, each) for each in shown if each.row_count]
    return found


def _grouped(columns: Sequence[Column]) -> Iterator[Sequence[Column]]:
    """Columns of one data set together where there are many."""
    groups = [list(columns)]
    if len(columns) > WIDE:
        groups = [list(own) for _, own in groupby(columns, key=lambda column: (column.data, column.only))]
    for own in groups:
        yield from (own[i : i + WIDE] for i in range(0, len(own), WIDE))


def _table(own: Table, key: str, t: float, columns: Sequence[Column], cells: Sequence[Cell]) -> RichTable:
    """Ours, and below it the paper's by model; what has no figure is left out."""
    made = table(["method", "whose"], [column.name for column in columns])
    figures: dict[tuple[str, str, str], float | None] = {
        ("ours", cell.line.name, cell.column.name): cell.shown.get(key) for cell in cells if cell.temperature == t
    }
    for (model, line, column, which), value in own.published.items():
        if which == key and t == own.temperatures[0]:
            figures["paper" if model == "-" else f"paper, {model}", line, column] = value
    for name in (line.name for line in own.lines):
        head = name
        for whose in dict.fromkeys(whose for whose, *_ in figures):
            values = [figures.get((whose, name, column.name)) for column in columns]
            if any(value is not None for value in values):
                style = "" if whose == "ours" else "dim"
                texts = [Text(figure(value, FIGURES[key][1]), style=style) for value in values]
                made.add_row(Text(head), Text(whose, style=style), *texts)
                head = ""
    return made


def _remarks(made: Reproduction, cells: Sequence[Cell]) -> list[str]:
    """Differences from the paper, in all rows and in single lines or columns."""
    found = [f"All rows: {'; '.join(_differs(made))}."]
    every = {cell.line.name for cell in cells}
    for text in dict.fromkeys(text for cell in cells for text in cell.differs):
        own = [cell for cell in cells if text in cell.differs]
        lines, columns = (
            list(dict.fromkeys(names)) for names in zip(*((c.line.name, c.column.name) for c in own), strict=True)
        )
        where = lines if set(lines) != every else columns if len(columns) < 4 else ["all columns"]
        found.append(f"{', '.join(where)}: {text}.")
    views: dict[str, dict[str, None]] = {}
    for cell in cells:
        if view := cell.row.get("view"):
            views.setdefault(cell.line.name, {})[view] = None
    if views:
        seen = (f"{line}: {', '.join(own) if len(own) < 4 else 'see --json'}" for line, own in views.items())
        found.append(f"Rows that are seen of a longer text (docs/figures.md): {'; '.join(seen)}.")
    return [*found, *made.scaled.table.remarks, *made.measuring.notes]


def _chart(made: Reproduction, cells: Sequence[Cell]) -> Any:
    """The table's first figure as bars, at its first temperature; marks are the paper's, of all its models."""
    own, t = made.scaled.table, cells[0].temperature
    key, columns = own.figures[0], list(dict.fromkeys(cell.column.name for cell in cells))
    shown = {(c.line.name, c.column.name): c.shown.get(key) for c in cells if c.temperature == t}
    lines = dict.fromkeys(line for (line, _), value in shown.items() if value is not None)
    mine = {line: [shown.get((line, column)) for column in columns] for line in lines}
    marks: dict[str, list[list[float]]] = {line: [[] for _ in columns] for line in lines}
    for (_, line, column, which), value in own.published.items():
        if which == key and line in marks and column in columns:
            marks[line][columns.index(column)].append(value)
    title = f"{own.heading} of {made.paper.name}: ours (bars) and the paper's (marks), {called(t)}"
    return charts.grouped(title, columns, mine, marks, FIGURES[key][0])
