"""``longdraft reproduce``: measures a paper's table, and shows it beside the paper's numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.text import Text

from longdraft.bench.papers import PAPERS, get_paper, get_table
from longdraft.bench.papers.table import Paper
from longdraft.bench.tables import new_table
from longdraft.cli import console, measure_options, options


def reproduce(
    *,
    paper: Annotated[str | None, typer.Argument(help=f"Paper: one of {', '.join(PAPERS)}.")] = None,
    table: Annotated[str | None, typer.Argument(help="Table or figure of the paper: 1, fig4, ...")] = None,
    scale: Annotated[
        Literal["small", "paper"],
        typer.Option(help="small: minutes on two CPU cores; paper: the paper's lengths, budgets and prompts."),
    ] = "small",
    draft: Annotated[
        list[Path] | None,
        typer.Option(
            help="Draft folder or small model. Repeat the option to give one draft of each kind.",
            show_default="those that ship",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=FILE: read a data set of the table from a file; repeatable.",
            show_default="Python's standard library for --scale small, the Hugging Face hub for --scale paper",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Number of prompts for each column of the table.", show_default="by --scale"),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", "-n", min=2, help="Maximum number of new tokens.", show_default="by --scale"),
    ] = None,
    plan: measure_options.Plan = "fixed",
    template_options: options.TemplateOptions,
    model_options: options.ModelOptions,
    output: measure_options.ReportOptions,
    user_files: options.UserFiles = None,
) -> None:
    """Measure a paper's table with this model, and show it beside the paper's numbers, with notes on differences.

    Without a table, list papers and tables, and what each needs. Ctrl-C ends the run and shows the results so far.
    """
    from longdraft.bench.experiment import unit_experiment
    from longdraft.bench.reproduce.run import prepare
    from longdraft.bench.reproduce.scaled import ScaledTable
    from longdraft.bench.reproduce.sources import SampleSources
    from longdraft.model.quant.stored_model import has_stored_weights

    if paper is None or table is None:
        _list_tables(None if paper is None else get_paper(paper), output)
        return
    selected = get_paper(paper)
    kwargs = template_options.chat_prompt_kwargs
    scaled = ScaledTable(get_table(selected, table), scale == "small", max_tokens, limit, plan, kwargs)
    output.check_writable()
    files = {name: file for name, _, file in (pair.partition("=") for pair in data or [])}
    if not all(files.values()):
        raise options.SettingError("--data takes NAME=FILE, such as gov_report=rows.jsonl.")
    sources = SampleSources(files, scaled.is_small)
    with console.status() as status:
        loaded = model_options.load(status)
        float_options = replace(model_options, weights="float32", arithmetic=None)
        load_dequantized = (lambda: float_options.load(lambda _: None)) if has_stored_weights(loaded.model) else None
        with options.settings_checked():
            run = prepare(selected, scaled, loaded, model_options.name, sources, draft or [], load_dequantized, status)
    for note in run.plan.notes:
        console.note(note)
    experiment = unit_experiment(run.plan.units, output.results, run.header)
    output.run(experiment, lambda complete: run.report(experiment.records, complete), "measurements")


def _list_tables(paper: Paper | None, output: options.OutputOptions) -> None:
    """Lists the tables of a paper (None: of all papers)."""
    from longdraft.bench.reproduce.scaled import describe_needs

    papers = list(PAPERS.values()) if paper is None else [paper]
    rows = [
        {
            "paper": p.name, "title": p.title, "reference": p.reference, "table": table.name, "shows": table.title,
            "needs": describe_needs(table),
        }
        for p in papers
        for table in p.tables
    ]  # fmt: skip
    overview = new_table(["paper", "table"])
    for heading in ("what it shows", "what it needs"):
        overview.add_column(heading)
    for row in rows:
        overview.add_row(*(Text(row[key]) for key in ("paper", "table", "shows", "needs")))
    titles = [Text(f"{p.name}: {p.title}. {p.reference}") for p in papers]
    console.print_report([("longdraft reproduce PAPER TABLE", overview)], titles)
    output.print_json(rows)
