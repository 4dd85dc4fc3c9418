"""``longdraft bench report``: results files as a page that can be read anywhere."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from longdraft.cli import console, options


def bench_report(
    *,
    files: Annotated[
        list[Path], typer.Argument(metavar="RESULTS...", help="Files that `longdraft bench --results` wrote.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for index.html and the charts (PNG).", show_default="RESULTS-report, beside the first file"
        ),
    ] = None,
    output: options.Output,
) -> None:
    """Make an HTML page of bench results: figures, charts over contexts, a round's time, memory, a drawn tree."""
    from longdraft.bench import html_report

    folder = out or files[0].with_name(f"{files[0].stem}-report")
    with console.status() as status:
        status("Reading results")
        made = f"Made on {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}"
        page = html_report.make(files, made, status)
        path = page.write(folder)
    if not output.as_json:
        console.line(str(path))
    output.json({"page": str(path), "images": [str(folder / name) for name in page.images]})
