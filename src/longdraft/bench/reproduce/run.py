"""Prepares the measurement of a paper's table, and reports it with the paper's rows below ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Table as RichTable
from rich.text import Text

from longdraft.bench import machine
from longdraft.bench.acceptance import format_temperature
from longdraft.bench.experiment import UnitRecord
from longdraft.bench.papers.table import FIGURES, Column, Paper, Table
from longdraft.bench.prompts import Prompt
from longdraft.bench.records import fingerprint
from longdraft.bench.reproduce import measures
from longdraft.bench.reproduce.scaled import ScaledTable, TablePlan, drafts_by_kind
from longdraft.bench.reproduce.sources import SampleSources, column_prompts
from longdraft.bench.results import unit_header
from longdraft.bench.tables import Report, format_cell, group_by, new_table
from longdraft.model.load.checkpoints import LoadedModel, Progress

FORMAT = "longdraft-reproduce"
MAX_COLUMNS = 8  # columns of figures that fit side by side
_MAX_LISTED_COLUMNS = 3  # more columns are named "all columns"

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Reproduction:
    """A paper's table with the plan of its measurement."""

    paper: Paper
    scaled_table: ScaledTable
    plan: TablePlan
    header: Mapping[str, Any]  # the header of the results file, which holds everything that the figures depend on

    def report(self, records: Sequence[UnitRecord], complete: bool) -> Report:
        """Makes the report of the records so far. ``complete``: True if no unit is missing."""
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
            "paper": self.paper.name, "reference": self.paper.reference, "table": table.name, "title": table.title,
            "scale": self.header["scale"], "model": model["name"], "figures": list(table.shown_figures), "rows": rows,
            "differs": differences, "remarks": list(table.remarks), "notes": list(self.plan.notes),
            **machine.environment(), "complete": complete,
        }  # fmt: skip
        name = f"{table.heading} of {self.paper.name}"
        remarks = [f"All rows: {'; '.join(differences)}.", *_remarks(rows), *table.remarks, *self.plan.notes]
        tables = list(_tables(name, table, rows))
        return Report(document, tables, list(map(Text, remarks)), _definitions(table))


def prepare(
    paper: Paper, scaled: ScaledTable, loaded: LoadedModel, model: str, sources: SampleSources,
    drafts: Sequence[Path] = (), load_dequantized: Callable[[], LoadedModel] | None = None,
    progress: Progress = lambda message: None,
) -> Reproduction:  # fmt: skip
    """Encodes the prompts of a table, and plans the measurement.

    Args:
        loaded, model: the target, and its name as the user wrote it.
        drafts: draft folders and files; the package's drafts serve the other kinds. Lines use the first of a kind, or
            the one that their ``draft_index`` says.
    """
    by_kind, table = drafts_by_kind(drafts), scaled.table
    prompts: dict[str, list[Prompt]] = {}
    if table.kind == "needle":
        plan = measures.plan_needles(scaled, loaded, sources, by_kind)
    else:
        differences: dict[str, list[str]] = {}
        # A batch needs at least as many prompts; None: all rows.
        num_prompts = scaled.num_prompts and max(scaled.num_prompts, *(column.batch for column in table.columns))
        samples = {name: sources.samples(name, num_prompts) for name in table.datasets}
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
        "scale": "small" if scaled.is_small else "paper",
        "settings": {
            "max_tokens": scaled.max_tokens,
            "prompts": scaled.num_prompts,
            "plan": scaled.plan,
            **({"foresee": False} if any(table.temperatures) else {}),
        },
        "units": list(plan.units),
        "drafts": {kind: "; ".join(map(fingerprint, folders)) for kind, folders in by_kind.items()},
    }
    token_ids = {name: [prompt.token_ids for prompt in group] for name, group in prompts.items()}
    header = unit_header(FORMAT, content, loaded, model, token_ids)
    return Reproduction(paper, scaled, plan, header)


def _definitions(table: Table) -> list[str]:
    """Makes the lines that define the figures as the paper does."""
    definitions = ["Definitions are the paper's; --json has longdraft's too (docs/figures.md)."]
    if "accepted" in table.figures:
        counts = "counts" if table.counts_bonus else "does not count"
        average = "sums over all prompts" if table.length_average == "pooled" else "the mean of the prompts"
        accepted = f"accepted length: the paper {counts} the bonus token; {average}"
        definitions.append(f"{accepted}; ±: one standard error (jackknife).")
    if table.kind == "speed" and not table.is_profiled:
        baseline = table.baseline if table.baseline != "hf-eager" else "transformers' generate with eager attention"
        prefill = "with the prefill" if table.includes_prefill else "without the prefill"
        average = "sums over all prompts" if table.rate_average == "pooled" else "the mean of the prompts"
        definitions.append(f"tokens/s: {prefill}, {average}; speed-ups are their quotients, over {baseline}.")
    return definitions


def _tables(name: str, table: Table, rows: Sequence[Row]) -> Iterator[tuple[str, RichTable]]:
    """Yields a title and a table for each temperature, figure and group of columns. Each line of the paper has our row,
    and below it the paper's row for each model. Rows and tables without figures are left out."""
    for group in group_by(rows, "temperature"):
        temperature = group[0]["temperature"]
        for key in table.shown_figures:
            title, pattern = FIGURES[key]
            cells = {  # (whose row: ours or the paper's, line, column) -> text
                ("ours", row["line"], row["column"]): format_cell(row["as_published"], key, pattern) for row in group
            }
            for (model, line, column, figure), value in table.published.items():
                if figure == key and temperature == table.temperatures[0]:
                    cells["paper" if model == "-" else f"paper, {model}", line, column] = pattern.format(value)
            for columns in _column_groups(table.columns):
                rich_table = new_table(["method", "whose"], [column.name for column in columns])
                for line in (line.name for line in table.lines):
                    heading = line  # only the first row of a line shows the name
                    for whose in dict.fromkeys(whose for whose, *_ in cells):
                        texts = [cells.get((whose, line, column.name), "-") for column in columns]
                        if any(text != "-" for text in texts):
                            style = "" if whose == "ours" else "dim"
                            rich_table.add_row(Text(heading), *(Text(text, style=style) for text in (whose, *texts)))
                            heading = ""
                if rich_table.row_count:
                    yield f"{name}: {title}, {format_temperature(temperature)}", rich_table


def _column_groups(columns: Sequence[Column]) -> Iterator[Sequence[Column]]:
    """Splits columns into groups of at most :data:`MAX_COLUMNS`. If a split is needed, each group has one data set."""
    groups = [list(columns)]
    if len(columns) > MAX_COLUMNS:
        groups = [list(group) for _, group in groupby(columns, key=lambda column: (column.dataset, column.line_names))]
    for group in groups:
        yield from (group[i : i + MAX_COLUMNS] for i in range(0, len(group), MAX_COLUMNS))


def _remarks(rows: Sequence[Row]) -> list[str]:
    """Describes the differences from the paper that concern only some lines or columns."""
    remarks = []
    all_lines = {row["line"] for row in rows}
    for difference in dict.fromkeys(text for row in rows for text in row["differs"]):
        affected = [row for row in rows if difference in row["differs"]]
        lines, columns = (list(dict.fromkeys(row[key] for row in affected)) for key in ("line", "column"))
        if set(lines) != all_lines:
            names = lines
        else:
            names = columns if len(columns) <= _MAX_LISTED_COLUMNS else ["all columns"]
        remarks.append(f"{', '.join(names)}: {difference}.")
    return remarks
