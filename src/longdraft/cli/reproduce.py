"""``longdraft reproduce``: a paper's table by one command, the paper's rows beside ours."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import replace
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from longdraft.bench import charts
from longdraft.bench.experiment import Experiment, Step, Tick
from longdraft.bench.papers import PAPERS, paper_named, table_of
from longdraft.bench.papers.table import Paper
from longdraft.bench.tables import table as empty
from longdraft.cli import bench_options, console, measuring, options

if TYPE_CHECKING:
    from longdraft.bench.reproduce.run import Reproduction


class Scale(str, Enum):
    """``small``: minutes on two cores with the embedded model; ``paper``: the paper's lengths, budgets and prompts."""

    small = "small"
    paper = "paper"


def reproduce(
    *,
    paper: Annotated[str | None, typer.Argument(help=f"One of {', '.join(PAPERS)}.")] = None,
    table: Annotated[str | None, typer.Argument(help="A table of it: 1, fig4, ...")] = None,
    scale: Annotated[
        Scale, typer.Option(help="small: minutes on two cores; paper: the paper's lengths, budgets and prompts.")
    ] = Scale.small,
    draft: Annotated[
        list[Path] | None,
        typer.Option(help="Draft folder or small model, one of a kind; repeatable.", show_default="those that ship"),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help="NAME=FILE, a data set of the table in a file (as of bench), or FILE for all of them; repeatable.",
            show_default="small: modules of Python's library; paper: the Hugging Face hub",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Prompts of each column.", show_default="as the scale has it")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", min=2, help="New tokens.", show_default="as the scale has it")
    ] = None,
    plan: bench_options.Plan = "fixed",
    wording: options.TemplateOptions,
    loading: options.ModelOptions,
    results: Annotated[
        Path | None,
        typer.Option(help="Append each measurement to this file (JSONL); with the same settings, go on where it ends."),
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Draw the table's first figure, the paper's as marks.")] = None,
    output: options.Output,
    composed: options.Load = None,
) -> None:
    """Make a paper's table with this model, the paper's rows beside ours, and what differs.

    Without a table: lists papers and tables, and what each needs. Ctrl-C ends it with the figures so far.
    """

    from longdraft.bench.reproduce import report
    from longdraft.bench.reproduce.run import prepare
    from longdraft.bench.reproduce.scaled import Scaled
    from longdraft.bench.reproduce.texts import Sources
    from longdraft.model.stored import is_stored

    if paper is None or table is None:
        _list(None if paper is None else paper_named(paper), output)
        return
    chosen = paper_named(paper)
    scaled = Scaled(table_of(chosen, table), scale is Scale.small, max_tokens, limit, plan, wording.asked)
    measuring.Rendered(svg=svg).check(results=results)
    sources = Sources.parsed(data or [], scaled.small)
    with ExitStack() as stack:
        if results is not None:
            folder = results.with_name(f"{results.stem}-drafts")
        else:
            folder = Path(stack.enter_context(TemporaryDirectory()))
        with console.status() as status:
            loaded = loading.load(status)
            plain = replace(loading, weights=options.WeightsKind.float32, arithmetic=None)
            unpacked = (lambda: plain.load(lambda message: None)) if is_stored(loaded.model) else None
            with options.settings_checked():
                made = prepare(chosen, scaled, loaded, loading.model, sources, folder, draft or [], unpacked, status)
        for note in made.measuring.notes:
            console.note(note)
        file = None if results is None else made.results(results)
        experiment = Experiment([_step(made, unit) for unit in made.measuring.units], lambda r: str(r["unit"]), file)
        complete = measuring.run(experiment, "measurements")
    done = {record["unit"]: record["measured"] for record in experiment.found}
    cells = made.measuring.cells(done)
    found = report.document(made, cells, complete)
    if cells:
        lines = (Text(line) for line in report.remarks(made, cells))
        console.report(report.tables(made, cells), lines, report.definitions(scaled.table))
        if svg is not None:
            measuring.write(svg, charts.image(report.chart(made, cells)))
    output.json(found)
    measuring.end(experiment, complete, "measurements")


def _step(made: Reproduction, unit: str) -> Step[str, dict[str, Any]]:
    def measure(missing: Collection[str], tick: Tick) -> Iterator[dict[str, Any]]:
        yield {"unit": unit, "measured": made.measuring.measure(unit, tick)}

    return Step(unit, (unit,), measure, made.measuring.ticks(unit))


def _list(paper: Paper | None, output: options.Output) -> None:
    """Papers and tables, a line each."""
    from longdraft.bench.reproduce.scaled import needs

    papers = list(PAPERS.values()) if paper is None else [paper]
    shown = empty(["paper", "table"])
    for heading in ("what it shows", "what it needs"):
        shown.add_column(heading)
    for each in papers:
        for own in each.tables:
            shown.add_row(Text(each.name), Text(own.name), Text(own.title), Text(needs(own)))
    titles = [Text(f"{each.name}: {each.title}. {each.reference}") for each in papers]
    console.report([("longdraft reproduce PAPER TABLE", shown)], titles)
    output.json(
        [
            {"paper": p.name, "title": p.title, "reference": p.reference, "table": t.name, "shows": t.title,
             "needs": needs(t)}
            for p in papers for t in p.tables
        ]
    )  # fmt: skip
