"""Prepares a paper's table for measurement, and reports it: the paper's rows below ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Table as RichTable
from rich.text import Text

from longdraft.bench.acceptance import format_temperature
from longdraft.bench.experiment import UnitRecord
from longdraft.bench.papers.table import FIGURES, Column, Paper, Table
from longdraft.bench.prompts import Prompt
from longdraft.bench.records import fingerprint
from longdraft.bench.reproduce import measures
from longdraft.bench.reproduce.scaled import ScaledTable, TablePlan, drafts_by_kind
from longdraft.bench.reproduce.sources import SampleSources, column_prompts
from longdraft.bench.results import unit_header
from longdraft.bench.tables import Report, environment_info, format_cell, group_by, new_table
from longdraft.model.checkpoints import LoadedModel, Progress

FORMAT = "longdraft-reproduce"
MAX_COLUMNS = 8  # of figures, side by side

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Reproduction:
    """A table, ready to be measured.

    Attributes:
        header: the header of the results file: all that the figures depend on.
    """

    paper: Paper
    scaled_table: ScaledTable
    plan: TablePlan
    header: Mapping[str, Any]

    def report(self, records: Sequence[UnitRecord], complete: bool) -> Report:
        """The report of the records so far. ``complete``: no unit is missing."""
        table, model = self.scaled_table.table, self.header["model"]
        rows = self.plan.rows(table, {record["unit"]: record["measured"] for record in records})
        hardware = self.header["hardware"]
        gpus = ", ".join(gpu["name"] for gpu in hardware["gpus"]) if model["device"] == "cuda" else ""
        differences = [
            f"model: {model['name']} (paper: {table.models})",
            f"hardware: {gpus or '{cores} cores of {cpu}'.format(**hardware)} (paper: {table.hardware})",
            *self.scaled_table.differences(),
        ]
        document = {
            "paper": self.paper.name,
            "reference": self.paper.reference,
            "table": table.name,
            "title": table.title,
            "scale": self.header["scale"],
            "model": model["name"],
            "figures": list(table.shown_figures),
            "rows": rows,
            "differs": differences,
            "remarks": list(table.remarks),
            "notes": list(self.plan.notes),
            **environment_info(),
            "complete": complete,
        }
        name = f"{table.heading} of {self.paper.name}"
        remarks = [f"All rows: {'; '.join(differences)}.", *_remarks(rows), *table.remarks, *self.plan.notes]
        tables = list(_tables(name, table, rows))
        return Report(document, tables, list(map(Text, remarks)), _definitions(table))


def prepare(
    paper: Paper,
    scaled: ScaledTable,
    loaded: LoadedModel,
    model: str,
    sources: SampleSources,
    drafts: Sequence[Path] = (),
    load_dequantized: Callable[[], LoadedModel] | None = None,
    progress: Progress = lambda message: None,
) -> Reproduction:
    """Encodes a table's prompts and plans its measurement.

    Args:
        model: the model's name as the user wrote it.
        drafts: draft folders and files, one of each kind; the package's drafts serve the other kinds.
        load_dequantized: see :class:`~longdraft.bench.run.Bench`.
    """
    by_kind, table = drafts_by_kind(drafts), scaled.table
    prompts: dict[str, list[Prompt]] = {}
    if table.kind == "needle":
        plan = measures.plan_needles(scaled, loaded, sources, by_kind)
    else:
        differences: dict[str, list[str]] = {}
        count = scaled.prompts and max(scaled.prompts, *(column.batch for column in table.columns))
        samples = {name: sources.samples(name, count) for name in table.datasets}
        encoded: dict[tuple[Any, ...], tuple[list[Prompt], list[str]]] = {}  # columns may share their prompts
        for column in table.columns:
            key = column.dataset, scaled.prompt_tokens(column), column.batch
            if key not in encoded:
                progress(f"Encoding {column.name}")
                encoded[key] = column_prompts(column, scaled, sources, loaded, samples[column.dataset])
            prompts[column.name], differences[column.name] = encoded[key]
        if table.kind == "quality":
            plan = measures.plan_quality(scaled, loaded, prompts, by_kind)
        else:
            plan = measures.plan_speed(scaled, loaded, prompts, by_kind, load_dequantized, progress)
        plan.differences = differences
    content = {
        "paper": paper.name,
        "table": table.name,
        "scale": "small" if scaled.small else "paper",
        "settings": {
            "max_tokens": scaled.max_tokens,
            "prompts": scaled.prompts,
            "plan": scaled.plan,
            **({"foresee": False} if any(table.temperatures) else {}),
        },
        "units": list(plan.units),
        "drafts": {kind: fingerprint(folder) for kind, folder in by_kind.items()},
    }
    token_ids = {name: [prompt.token_ids for prompt in group] for name, group in prompts.items()}
    header = unit_header(FORMAT, content, loaded, model, token_ids)
    return Reproduction(paper, scaled, plan, header)


def _definitions(table: Table) -> list[str]:
    """Definitions of the figures, which follow the paper."""
    lines = ["Definitions are the paper's; --json has longdraft's too (docs/figures.md)."]
    if "accepted" in table.figures:
        counts = "counts" if table.counts_bonus else "does not count"
        how = "sums over all prompts" if table.length_average == "pooled" else "the mean of the prompts"
        lines.append(f"accepted length: the paper {counts} the bonus token; {how}; ±: one standard error (jackknife).")
    if table.kind == "speed" and not table.is_profiled:
        over = table.baseline if table.baseline != "hf-eager" else "transformers' generate with eager attention"
        prefill = "with the prefill" if table.includes_prefill else "without the prefill"
        how = "sums over all prompts" if table.rate_average == "pooled" else "the mean of the prompts"
        lines.append(f"tokens/s: {prefill}, {how}; speed-ups are their quotients, over {over}.")
    return lines


def _tables(name: str, table: Table, rows: Sequence[Row]) -> Iterator[tuple[str, RichTable]]:
    """Yields a title and a table for each temperature, figure and group of columns. Below our row of a line is the
    paper's row for each model. Rows and tables without figures are left out."""
    for group in group_by(rows, "temperature"):
        t = group[0]["temperature"]
        for key in table.shown_figures:
            form = FIGURES[key][1]
            cells = {  # (source, line, column) -> text
                ("ours", row["line"], row["column"]): format_cell(row["as_published"], key, form) for row in group
            }
            for (model, line, column, figure), value in table.published.items():
                if figure == key and t == table.temperatures[0]:
                    cells["paper" if model == "-" else f"paper, {model}", line, column] = form.format(value)
            for columns in _column_groups(table.columns):
                rich_table = new_table(["method", "whose"], [column.name for column in columns])
                for line in (line.name for line in table.lines):
                    heading = line  # only in the line's first row
                    for source in dict.fromkeys(source for source, *_ in cells):
                        texts = [cells.get((source, line, column.name), "-") for column in columns]
                        if any(text != "-" for text in texts):
                            style = "" if source == "ours" else "dim"
                            rich_table.add_row(Text(heading), *(Text(text, style=style) for text in (source, *texts)))
                            heading = ""
                if rich_table.row_count:
                    yield f"{name}: {FIGURES[key][0]}, {format_temperature(t)}", rich_table


def _column_groups(columns: Sequence[Column]) -> Iterator[Sequence[Column]]:
    """Groups of at most :data:`MAX_COLUMNS` columns. With several groups, each has one data set."""
    groups = [list(columns)]
    if len(columns) > MAX_COLUMNS:
        groups = [list(group) for _, group in groupby(columns, key=lambda column: (column.dataset, column.line_names))]
    for group in groups:
        yield from (group[i : i + MAX_COLUMNS] for i in range(0, len(group), MAX_COLUMNS))


def _remarks(rows: Sequence[Row]) -> list[str]:
    """Differences from the paper that concern some lines or columns."""
    remarks = []
    all_lines = {row["line"] for row in rows}
    for difference in dict.fromkeys(text for row in rows for text in row["differs"]):
        affected = [row for row in rows if difference in row["differs"]]
        lines, columns = (list(dict.fromkeys(row[key] for row in affected)) for key in ("line", "column"))
        where = lines if set(lines) != all_lines else columns if len(columns) < 4 else ["all columns"]
        remarks.append(f"{', '.join(where)}: {difference}.")
    return remarks
