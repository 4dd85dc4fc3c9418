"""Measurements on the command line: their progress, results files and Ctrl-C, and the forms that they are shown in."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from longdraft.bench import charts
from longdraft.bench.experiment import Experiment
from longdraft.bench.tables import Report, render
from longdraft.cli import console, options, processes
from longdraft.cli.cancel import EXIT_CODE
from longdraft.cli.progress import Runs
from longdraft.errors import CheckpointError


def run(experiment: Experiment[Any, Any], unit: str = "runs") -> bool:
    """Makes the records that are missing; False if Ctrl-C ended it.

    Args:
        unit: what a record is, for people.
    """
    if experiment.found and experiment.file is not None:
        there, left = len(experiment.found), len(experiment.keys) - len(experiment.found)
        console.note(f"{there} {unit} are in {experiment.file.path} already; {left} are left.")
    with console.warnings_once(), Runs(experiment.ticks) as shown:
        try:
            for _ in experiment.run(shown.told):
                pass
        except KeyboardInterrupt:
            return False
    return True


def end(experiment: Experiment[Any, Any], complete: bool, unit: str = "runs") -> None:
    """Ends a verb that Ctrl-C stopped: says how far it came."""
    if not complete:
        kept = "" if experiment.file is not None else " Nothing is kept."
        console.note(f"Stopped after {len(experiment.found)} of {len(experiment.keys)} {unit}.{kept}")
        raise typer.Exit(EXIT_CODE)


@dataclass(frozen=True)
class Rendered(options.Output):
    """The forms that a measurement's tables are shown in."""

    as_json: options.Json = False
    debug: options.Debug = False
    markdown: Annotated[Path | None, typer.Option(help="Write the tables to this file (Markdown).")] = None
    svg: Annotated[Path | None, typer.Option(help="Draw the figure; of several, one each: NAME-WHICH.svg.")] = None
    html: Annotated[Path | None, typer.Option(help="Write one page (HTML): tables and figures.")] = None

    def check(self, **more: Path | None) -> None:
        """Refuses what cannot be written, before anything is measured.

        Args:
            more: further files, by option.

        Raises:
            CheckpointError: a folder that does not exist, or a file's name that is a folder.
            CapabilityError: a figure is asked for, and matplotlib is missing.
        """
        for option, path in {"markdown": self.markdown, "svg": self.svg, "html": self.html, **more}.items():
            if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
                raise CheckpointError(f"--{option} {path}: its folder does not exist, or it is a folder itself.")
        if self.svg is not None or self.html is not None:
            charts.available()

    def show(self, report: Report) -> None:
        """Shows a report on stdout, the JSON object last, and writes its files."""
        if report.document.get("rows", True):
            console.report(report.tables, report.remarks, report.definitions)
            if processes.is_first():
                self._write(report)
        self.json(report.document)

    def _write(self, report: Report) -> None:
        if self.markdown is not None:
            write(self.markdown, render([report], "markdown"))
        if self.html is not None:
            write(self.html, render([report], "html"))
        if (svg := self.svg) is not None:
            for name, make in report.figures.items():
                which = "" if len(report.figures) == 1 else "-" + re.sub(r"[^\w.-]+", "_", name)
                path = svg.with_name(f"{svg.stem}{which}{svg.suffix}")
                write(path, charts.image(make()))
                console.note(f"The figure is in {path}.")


def write(path: Path, content: str | bytes) -> None:
    """Writes a file.

    Raises:
        CheckpointError: it cannot be written.
    """
    try:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}.") from error
