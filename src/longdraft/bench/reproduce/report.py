"""A table with the paper's rows beside ours: JSON, tables for people, a chart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.table import Table as RichTable
from rich.text import Text

from longdraft.bench import charts
from longdraft.bench.acceptance import called
from longdraft.bench.papers.table import FIGURES, Column, Kind, Published, Table
from longdraft.bench.reproduce.run import Reproduction
from longdraft.bench.reproduce.scaled import Cell
from longdraft.bench.tables import circumstances, figure, table

OURS = "ours"
# Columns of figures beside each other.
WIDE = 8


def document(made: Reproduction, cells: Sequence[Cell], complete: bool) -> dict[str, Any]:
    """The table as one JSON object, with the keys that docs/figures.md defines.

    Args:
        complete: no unit is missing.
    """
    own, published = made.scaled.table, _all_published(made.scaled.table)
    return {
        "paper": made.paper.name,
        "reference": made.paper.reference,
        "table": own.name,
        "title": own.title,
        "scale": made.header["scale"],
        "model": made.header["model"]["name"],
        "figures": list(_figures(own)),
        "rows": [_row(cell, published) for cell in cells],
        "differs": _differs(made),
        "remarks": list(own.remarks),
        "notes": list(made.measuring.notes),
        **circumstances(),
        "complete": complete,
    }


def _row(cell: Cell, published: Sequence[Published]) -> dict[str, Any]:
    beside: dict[str, dict[str, Any]] = {}
    for p in published:
        # The papers' figures in numbers are greedy.
        if (p.line, p.column) == (cell.line.name, cell.column.name) and not cell.temperature:
            beside.setdefault(p.model, {"model": p.model})[p.figure] = p.value
    return {
        "line": cell.line.name,
        "column": cell.column.name,
        "temperature": cell.temperature,
        **cell.row,
        "as_published": dict(cell.shown),
        "published": list(beside.values()),
        "differs": list(cell.differs),
    }


def _figures(own: Table) -> tuple[str, ...]:
    """Keys of the figures that a table shows."""
    speed = own.kind is Kind.speed and not own.profiled and own.figures != ("tokens_per_second",)
    return tuple(dict.fromkeys((*own.figures, *(["speedup"] if speed else []))))


def _all_published(own: Table) -> list[Published]:
    """The paper's figures, with speed-ups from its tokens/s where it does not print them."""
    found = list(own.published)
    if any(p.figure == "speedup" for p in found) or own.kind is not Kind.speed:
        return found
    rates = {(p.model, p.line, p.column): p.value for p in found if p.figure == "tokens_per_second"}
    for (model, line, column), rate in rates.items():
        if (base := rates.get((model, own.baseline, column))) is not None:
            found.append(Published(model, line, column, "speedup", rate / base))
    return found


def _differs(made: Reproduction) -> list[str]:
    """Differences from the paper in all rows."""
    own, hardware = made.scaled.table, made.header["hardware"]
    gpus = ", ".join(gpu["name"] for gpu in hardware["gpus"])
    ours = (
        gpus if made.header["model"]["device"] == "cuda" and gpus else f"{hardware['cores']} cores of {hardware['cpu']}"
    )
    return [
        f"model: {made.header['model']['name']} (paper: {own.models})",
        f"hardware: {ours} (paper: {own.hardware})",
        *made.scaled.differs(),
    ]


def definitions(own: Table) -> list[str]:
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


def tables(made: Reproduction, cells: Sequence[Cell]) -> list[tuple[str, RichTable]]:
    """A title and a table for each temperature, figure and group of columns."""
    own, published = made.scaled.table, _all_published(made.scaled.table)
    found = []
    for t in dict.fromkeys(cell.temperature for cell in cells):
        for key in _figures(own):
            for columns in _grouped(own.columns):
                shown = _table(own, key, t, columns, cells, published)
                if shown.row_count:
                    found.append((f"{own.heading} of {made.paper.name}: {FIGURES[key][0]}, {called(t)}", shown))
    return found


def _grouped(columns: Sequence[Column]) -> Iterator[list[Column]]:
    """Columns of one data set together where there are many."""
    groups = [list(columns)]
    if len(columns) > WIDE:
        groups = [list(own) for _, own in groupby(columns, key=lambda column: (column.data, column.only))]
    for own in groups:
        yield from (own[i : i + WIDE] for i in range(0, len(own), WIDE))


def _table(
    own: Table, key: str, t: float, columns: Sequence[Column], cells: Sequence[Cell], published: Sequence[Published]
) -> RichTable:
    form, made = FIGURES[key][1], table(["method", "whose"], [column.name for column in columns])
    mine = {(cell.line.name, cell.column.name): cell.shown.get(key) for cell in cells if cell.temperature == t}
    theirs = {(p.model, p.line, p.column): p.value for p in published if p.figure == key and not t}
    for line in own.lines:
        values = [mine.get((line.name, column.name)) for column in columns]
        rows = [(OURS, values)]
        for model in dict.fromkeys(model for model, *_ in theirs):
            values = [theirs.get((model, line.name, column.name)) for column in columns]
            rows.append(("paper" if model == "-" else f"paper, {model}", values))
        known = [(whose, values) for whose, values in rows if any(x is not None for x in values)]
        for i, (whose, values) in enumerate(known):
            style = "" if whose == OURS else "dim"
            texts = (Text(figure(x, form), style=style) for x in values)
            made.add_row(Text("" if i else line.name), Text(whose, style=style), *texts)
    return made


def remarks(made: Reproduction, cells: Sequence[Cell]) -> list[str]:
    """Differences from the paper, in all rows and in single lines or columns."""
    found = [f"All rows: {'; '.join(_differs(made))}."]
    by_text: dict[str, list[Cell]] = {}
    for cell in cells:
        for text in cell.differs:
            by_text.setdefault(text, []).append(cell)
    for text, those in by_text.items():
        lines, columns = (
            dict.fromkeys(keys) for keys in ((c.line.name for c in those), (c.column.name for c in those))
        )
        every = len(lines) == len({cell.line.name for cell in cells})
        where = ", ".join(columns if every and len(columns) < 4 else lines if not every else ["all columns"])
        found.append(f"{where}: {text}.")
    views: dict[str, list[str]] = {}
    for cell in cells:
        if (view := cell.row.get("view")) and view not in (own := views.setdefault(cell.line.name, [])):
            own.append(view)
    if views:
        seen = (f"{line}: {', '.join(own) if len(own) < 4 else 'see --json'}" for line, own in views.items())
        found.append(f"Rows that are seen of a longer text (docs/figures.md): {'; '.join(seen)}.")
    return [*found, *made.scaled.table.remarks, *made.measuring.notes]


def chart(made: Reproduction, cells: Sequence[Cell]) -> Any:
    """The table's first figure as bars, at its first temperature; marks are the paper's, of all its models."""
    own, published = made.scaled.table, _all_published(made.scaled.table)
    key, t = own.figures[0], cells[0].temperature
    columns = list(dict.fromkeys(cell.column.name for cell in cells))
    mine: dict[str, list[float | None]] = {}
    shown = {(cell.line.name, cell.column.name): cell.shown.get(key) for cell in cells if cell.temperature == t}
    for line in own.lines:
        values = [shown.get((line.name, column)) for column in columns]
        if any(x is not None for x in values):
            mine[line.name] = values
    beside: dict[tuple[str, str], list[float]] = {}
    for p in published:
        if p.figure == key:
            beside.setdefault((p.line, p.column), []).append(p.value)
    marks = {name: [beside.get((name, column), []) for column in columns] for name in mine}
    title = f"{own.heading} of {made.paper.name}: ours (bars) and the paper's (marks), {called(t)}"
    return charts.grouped(title, columns, mine, marks, FIGURES[key][0])
