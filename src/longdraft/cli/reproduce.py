"""``longdraft reproduce``: a paper's table by one command, the paper's rows beside ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.text import Text

from longdraft.bench.papers import PAPERS, get_paper, get_table
from longdraft.bench.papers.table import Paper
from longdraft.bench.tables import new_table as empty
from longdraft.cli import console, measure_options, options


def reproduce(
    *,
    paper: Annotated[str | None, typer.Argument(help=f"One of {', '.join(PAPERS)}.")] = None,
    table: Annotated[str | None, typer.Argument(help="A table of it: 1, fig4, ...")] = None,
    scale: Annotated[
        Literal["small", "paper"],
        typer.Option(help="small: minutes on two cores; paper: the paper's lengths, budgets and prompts."),
    ] = "small",
    draft: Annotated[
        list[Path] | None,
        typer.Option(help="Draft folder or small model, one of a kind; repeatable.", show_default="those that ship"),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help="NAME=FILE, a data set of the table in a file (as of bench); repeatable.",
            show_default="small: modules of Python's library; paper: the Hugging Face hub",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Prompts of each column.", show_default="as the scale has it")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", min=2, help="New tokens.", show_default="as the scale has it")
    ] = None,
    plan: measure_options.Plan = "fixed",
    wording: options.TemplateOptions,
    loading: options.ModelOptions,
    output: measure_options.ReportOptions,
    composed: options.Load = None,
) -> None:
    """Make a paper's table with this model, the paper's rows beside ours, and what differs.

    Without a table: lists papers and tables, and what each needs. Ctrl-C ends it with the figures so far.
    """

    from longdraft.bench.experiment import unit_experiment
    from longdraft.bench.reproduce.run import prepare
    from longdraft.bench.reproduce.scaled import ScaledTable
    from longdraft.bench.reproduce.sources import SampleSources
    from longdraft.model.stored_model import has_stored_weights

    if paper is None or table is None:
        _list(None if paper is None else get_paper(paper), output)
        return
    chosen = get_paper(paper)
    scaled = ScaledTable(get_table(chosen, table), scale == "small", max_tokens, limit, plan, wording.asked)
    output.check_writable()
    files = dict(each.partition("=")[::2] for each in data or [])
    if not all(files.values()):
        raise options.SettingError("--data takes NAME=FILE, such as gov_report=rows.jsonl.")
    sources = SampleSources(files, scaled.small)
    with console.status() as status:
        loaded = loading.load(status)
        plain = replace(loading, weights="float32", arithmetic=None)
        unpacked = (lambda: plain.load(lambda message: None)) if has_stored_weights(loaded.model) else None
        with options.settings_checked():
            made = prepare(chosen, scaled, loaded, loading.name, sources, draft or [], unpacked, status)
    for note in made.plan.notes:
        console.note(note)
    experiment = unit_experiment(made.plan.units, output.results, made.header)
    output.run(experiment, lambda complete: made.report(experiment.records, complete), "measurements")


def _list(paper: Paper | None, output: options.OutputOptions) -> None:
    """Papers and tables, a line each."""
    from longdraft.bench.reproduce.scaled import describe_needs

    papers = list(PAPERS.values()) if paper is None else [paper]
    rows = [
        {
            "paper": own.name,
            "title": own.title,
            "reference": own.reference,
            "table": each.name,
            "shows": each.title,
            "needs": describe_needs(each),
        }
        for own in papers
        for each in own.tables
    ]
    shown = empty(["paper", "table"])
    for heading in ("what it shows", "what it needs"):
        shown.add_column(heading)
    for row in rows:
        shown.add_row(*(Text(row[key]) for key in ("paper", "table", "shows", "needs")))
    titles = [Text(f"{own.name}: {own.title}. {own.reference}") for own in papers]
    console.print_report([("longdraft reproduce PAPER TABLE", shown)], titles)
    output.print_json(rows)
