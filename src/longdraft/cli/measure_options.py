"""Measurements on the command line: options that they share, progress, Ctrl-C, and the forms that they are shown in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from longdraft.bench import tasks
from longdraft.bench.data import Sample, ShortTextPolicy
from longdraft.bench.experiment import Experiment
from longdraft.bench.tables import Report, to_markdown
from longdraft.cli import console, options, processes
from longdraft.cli.cancel import EXIT_CODE
from longdraft.cli.progress import RunsBar
from longdraft.errors import CheckpointError
from longdraft.files import file_errors

Plan = Annotated[
    Literal["fixed", "auto"],
    typer.Option("--plan", help="fixed: trees as the papers have them; auto: trees that pay here, or none."),
]
ShortPrompts = Annotated[
    ShortTextPolicy,
    typer.Option(help="Texts shorter than a length: leave them out, join the next rows' texts, or keep them."),
]


@dataclass(frozen=True)
class PromptOptions(options.TemplateOptions):
    """Prompts of a measurement, and how they are answered."""

    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help="JSONL (rows with `text`, or with `context` and `input`); or a data set by name, from the hub "
            f"({', '.join(tasks.NAMES)}), or NAME=PATH with its files; repeatable.",
            show_default="long modules of Python's standard library",
        ),
    ] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Rows of each file.", show_default="all")] = None
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=2, help="New tokens at most.")] = 64
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Decode on to --max-tokens, so that all do the same work.")
    ] = False
    raw: Annotated[bool, typer.Option("--raw", help="Prompts as they are; no chat template.")] = False

    @property
    def sources(self) -> list[str]:
        """The data sets and files."""
        return self.data or [tasks.BUILT_IN]

    def read(self) -> list[Sample]:
        """The samples."""
        return tasks.load_samples(self.sources, self.limit)


@dataclass(frozen=True)
class SeededPromptOptions(PromptOptions):
    """The same with a seed."""

    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0


@dataclass(frozen=True)
class ReportOptions(options.OutputOptions):
    """The file that keeps what is measured, and the forms that its tables are shown in."""

    results: Annotated[
        Path | None,
        typer.Option(help="Append each measurement to this file (JSONL); what is there already is not made again."),
    ] = None
    markdown: Annotated[Path | None, typer.Option(help="Write the tables to this file (Markdown).")] = None

    def check_writable(self, **more: Path | None) -> None:
        """Refuses what cannot be written, before anything is measured.

        Args:
            more: files of further options, by the option's name.

        Raises:
            CheckpointError: a folder that does not exist, or a file's name that is a folder.
        """
        for option, path in {"results": self.results, "markdown": self.markdown, **more}.items():
            if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
                raise CheckpointError(f"--{option} {path}: its folder does not exist, or it is a folder itself.")

    def run(self, experiment: Experiment[Any, Any], report: Callable[[bool], Report], unit: str = "runs") -> None:
        """Makes the records that are missing, and shows what there is then; Ctrl-C ends it with the records so far.

        Args:
            report: makes the report; False: some records are missing.
            unit: what a record is, for people.
        """
        if experiment.records and experiment.file is not None:
            there, left = len(experiment.records), len(experiment.keys) - len(experiment.records)
            console.note(f"{there} {unit} are in {experiment.file.path} already; {left} are left.")
        complete = True
        with console.warnings_once(), RunsBar(experiment.ticks) as shown:
            try:
                for _ in experiment.run(shown.ticker):
                    pass
            except KeyboardInterrupt:
                complete = False
        self.show(report(complete))
        if not complete:
            kept = "" if experiment.file is not None else " Nothing is kept."
            console.note(f"Stopped after {len(experiment.records)} of {len(experiment.keys)} {unit}.{kept}")
            raise typer.Exit(EXIT_CODE)

    def show(self, report: Report) -> None:
        """Shows a report on stdout, the JSON object last, and writes its file."""
        if report.document.get("rows", True):
            console.print_report(report.tables, report.remarks, report.definitions)
            if self.markdown is not None and processes.is_main_process():
                write_file(self.markdown, to_markdown(report).encode())
        self.print_json(report.document)


def write_file(path: Path, content: bytes) -> None:
    """Writes a file.

    Raises:
        CheckpointError: it cannot be written.
    """
    with file_errors(path, f"{path} cannot be written"):
        path.write_bytes(content)
