"""A table ready to be measured, and its report: the paper's rows beside ours."""

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
# Columns of figures beside each other.
WIDE = 8

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Reproduction:
    """A table, ready to be measured.

    Attributes:
        header: all that its figures depend on.
    """

    paper: Paper
    scaled_table: ScaledTable
    plan: TablePlan
    header: Mapping[str, Any]

    def report(self, found: Sequence[UnitRecord], complete: bool) -> Report:
        """The report of what has been measured.

        Args:
            complete: no unit is missing.
        """
        own, model = self.scaled_table.table, self.header["model"]
        rows = self.plan.rows(own, {record["unit"]: record["measured"] for record in found})
        hardware = self.header["hardware"]
        gpus = ", ".join(gpu["name"] for gpu in hardware["gpus"]) if model["device"] == "cuda" else ""
        differs = [
            f"model: {model['name']} (paper: {own.models})",
            f"hardware: {gpus or '{cores} cores of {cpu}'.format(**hardware)} (paper: {own.hardware})",
            *self.scaled_table.differences(),
        ]
        document = {
            "paper": self.paper.name,
            "reference": self.paper.reference,
            "table": own.name,
            "title": own.title,
            "scale": self.header["scale"],
            "model": model["name"],
            "figures": list(own.shown_figures),
            "rows": rows,
            "differs": differs,
            "remarks": list(own.remarks),
            "notes": list(self.plan.notes),
            **environment_info(),
            "complete": complete,
        }
        name = f"{own.heading} of {self.paper.name}"
        remarks = [f"All rows: {'; '.join(differs)}.", *_remarks(rows), *own.remarks, *self.plan.notes]
        tables = list(_tables(name, own, rows))
        return Report(document, tables, list(map(Text, remarks)), _definitions(own))


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
    """Encodes a table's prompts and settles its methods.

    Args:
        model: as the user named it.
        drafts: draft folders and files, one of a kind; others are those that come with longdraft.
        load_dequantized: as of :class:`~longdraft.bench.run.Bench`.
    """
    by_kind, own = drafts_by_kind(drafts), scaled.table
    prompts: dict[str, list[Prompt]] = {}
    if own.kind == "needle":
        plan = measures.plan_needles(scaled, loaded, sources, by_kind)
    else:
        differs: dict[str, list[str]] = {}
        count = scaled.prompts and max(scaled.prompts, *(column.batch for column in own.columns))
        rows = {name: sources.samples(name, count) for name in own.datasets}
        seen: dict[tuple[Any, ...], tuple[list[Prompt], list[str]]] = {}
        for column in own.columns:
            key = column.dataset, scaled.prompt_tokens(column), column.batch
            if key not in seen:
                progress(f"Encoding {column.name}")
                seen[key] = column_prompts(column, scaled, sources, loaded, rows[column.dataset])
            prompts[column.name], differs[column.name] = seen[key]
        if own.kind == "quality":
            plan = measures.plan_quality(scaled, loaded, prompts, by_kind)
        else:
            plan = measures.plan_speed(scaled, loaded, prompts, by_kind, load_dequantized, progress)
        plan.differences = differs
    content = {
        "paper": paper.name,
        "table": own.name,
        "scale": "small" if scaled.small else "paper",
        "settings": {
            "max_tokens": scaled.max_tokens,
            "prompts": scaled.prompts,
            "plan": scaled.plan,
            **({"foresee": False} if any(own.temperatures) else {}),
        },
        "units": list(plan.units),
        "drafts": {kind: fingerprint(folder) for kind, folder in by_kind.items()},
    }
    tokens = {name: [prompt.token_ids for prompt in texts] for name, texts in prompts.items()}
    header = unit_header(FORMAT, content, loaded, model, tokens)
    return Reproduction(paper, scaled, plan, header)


def _definitions(own: Table) -> list[str]:
    """Definitions of the figures, where the paper's are not this package's."""
    found = ["Definitions are the paper's; --json has this package's too (docs/figures.md)."]
    if "accepted" in own.figures:
        counted = "counts" if own.counts_bonus else "does not count"
        how = "sums over all prompts" if own.length_average == "pooled" else "the mean of the prompts"
        found.append(f"accepted length: the paper {counted} the bonus token; {how}; ±: one standard error (jackknife).")
    if own.kind == "speed" and not own.is_profiled:
        over = own.baseline if own.baseline != "hf-eager" else "transformers' generate with eager attention"
        prefill = "with the prompt's reading" if own.includes_prefill else "without the prompt's reading"
        how = "sums over all prompts" if own.rate_average == "pooled" else "the mean of the prompts"
        found.append(f"tokens/s: {prefill}, {how}; speed-ups are their quotients, over {over}.")
    return found


def _tables(name: str, own: Table, rows: Sequence[Row]) -> Iterator[tuple[str, RichTable]]:
    """A title and a table for each temperature, figure and group of columns: ours, and below it the paper's by model;
    what has no figure is left out."""
    for alike in group_by(rows, "temperature"):
        t = alike[0]["temperature"]
        for key in own.shown_figures:
            form = FIGURES[key][1]
            figures = {
                ("ours", row["line"], row["column"]): format_cell(row["as_published"], key, form) for row in alike
            }
            for (model, line, column, which), value in own.published.items():
                if which == key and t == own.temperatures[0]:
                    figures["paper" if model == "-" else f"paper, {model}", line, column] = form.format(value)
            for columns in _beside(own.columns):
                made = new_table(["method", "whose"], [column.name for column in columns])
                for head in (line.name for line in own.lines):
                    said = head
                    for whose in dict.fromkeys(whose for whose, *_ in figures):
                        texts = [figures.get((whose, head, column.name), "-") for column in columns]
                        if any(text != "-" for text in texts):
                            style = "" if whose == "ours" else "dim"
                            made.add_row(Text(said), *(Text(text, style=style) for text in (whose, *texts)))
                            said = ""
                if made.row_count:
                    yield f"{name}: {FIGURES[key][0]}, {format_temperature(t)}", made


def _beside(columns: Sequence[Column]) -> Iterator[Sequence[Column]]:
    """Columns of one data set together where there are many."""
    groups = [list(columns)]
    if len(columns) > WIDE:
        groups = [list(own) for _, own in groupby(columns, key=lambda column: (column.dataset, column.line_names))]
    for own in groups:
        yield from (own[i : i + WIDE] for i in range(0, len(own), WIDE))


def _remarks(rows: Sequence[Row]) -> list[str]:
    """Differences from the paper in single lines or columns."""
    found = []
    every = {row["line"] for row in rows}
    for text in dict.fromkeys(text for row in rows for text in row["differs"]):
        own = [row for row in rows if text in row["differs"]]
        lines, columns = (list(dict.fromkeys(row[key] for row in own)) for key in ("line", "column"))
        where = lines if set(lines) != every else columns if len(columns) < 4 else ["all columns"]
        found.append(f"{', '.join(where)}: {text}.")
    return found
