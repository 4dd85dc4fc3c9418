"""Options that benchmarks share, and how benchmarks run: progress, Ctrl-C, reports."""

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
from longdraft.cli.cancel import CTRL_C_EXIT_CODE
from longdraft.cli.progress import RunsBar
from longdraft.errors import CheckpointError
from longdraft.files import file_errors

Plan = Annotated[
    Literal["fixed", "auto"],
    typer.Option("--plan", help="fixed: the methods' own trees; auto: the fastest trees on this machine, if any."),
]
ShortTexts = Annotated[
    ShortTextPolicy,
    typer.Option(help="Texts shorter than a length: leave them out, join them with the next texts, or keep them."),
]


@dataclass(frozen=True)
class PromptOptions(options.TemplateOptions):
    """Options of a benchmark's prompts and answers."""

    data: Annotated[
        list[str] | None,
        typer.Option(
            help="JSONL file (rows with `text`, or `context` and `input`); or a data set of the hub "
            f"({', '.join(tasks.NAMES)}); or NAME=PATH, a data set in files; repeatable.",
            show_default="long modules of Python's standard library",
        ),
    ] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Rows of each file to use.", show_default="all")] = None
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=2, help="Maximum number of new tokens.")] = 64
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Ignore end-of-sequence tokens: all methods decode --max-tokens.")
    ] = False
    raw: Annotated[bool, typer.Option("--raw", help="Use prompts as plain text, without a chat template.")] = False

    @property
    def settings_kwargs(self) -> dict[str, Any]:
        """The arguments of a benchmark's Settings that these options set."""
        names = ("max_tokens", "seed", "raw", "ignore_eos")
        values = {name: value for name, value in vars(self).items() if name in names}
        return {**values, "template_kwargs": self.chat_prompt_kwargs}

    @property
    def sources(self) -> list[str]:
        """Names of the data sets and files of --data, or of the built-in data set."""
        return self.data or [tasks.BUILT_IN]

    def read(self) -> list[Sample]:
        """Reads the samples."""
        return tasks.load_samples(self.sources, self.limit)


@dataclass(frozen=True)
class SeededPromptOptions(PromptOptions):
    """Prompt options with a seed."""

    seed: Annotated[int, typer.Option(help="Random seed of sampling.")] = 0


@dataclass(frozen=True)
class ReportOptions(options.OutputOptions):
    """Options of the results file and of the report."""

    results: Annotated[
        Path | None,
        typer.Option(help="Append results to this JSONL file; results that the file has are not measured again."),
    ] = None
    markdown: Annotated[Path | None, typer.Option(help="Write the tables to this Markdown file.")] = None

    def check_writable(self, **others: Path | None) -> None:
        """Checks that output files can be written, before anything is measured.

        Args:
            others: option name -> file, for further options.

        Raises:
            CheckpointError: the folder of a file does not exist, or the path is a folder.
        """
        for option, path in {"results": self.results, "markdown": self.markdown, **others}.items():
            if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
                raise CheckpointError(f"--{option} {path}: name a file in a folder that exists.")

    def run(self, experiment: Experiment[Any, Any], make_report: Callable[[bool], Report], unit: str = "runs") -> None:
        """Measures what the results file lacks, then shows a report. Ctrl-C shows a report of the results so far.

        Args:
            experiment: what to measure, and the results file.
            make_report: makes the report; its argument is True if no result is missing.
            unit: name of the results in messages, in the plural.
        """
        if experiment.records and experiment.file is not None:
            num_done, num_all = len(experiment.records), len(experiment.keys)
            console.note(f"{num_done} {unit} are in {experiment.file.path} already; {num_all - num_done} are left.")
        complete = True
        with console.warnings_once(), RunsBar(experiment.num_runs_left) as bar:
            try:
                for _ in experiment.run(bar.ticker):
                    pass
            except KeyboardInterrupt:
                complete = False
        self.show(make_report(complete))
        if not complete:
            hint = "" if experiment.file is not None else " They are not saved: name a file with --results."
            console.note(f"Stopped after {len(experiment.records)} of {len(experiment.keys)} {unit}.{hint}")
            raise typer.Exit(CTRL_C_EXIT_CODE)

    def show(self, report: Report) -> None:
        """Shows a report on stdout, the JSON object last, and writes the Markdown file."""
        if report.document.get("rows", True):  # Ctrl-C may have left no rows
            console.print_report(report.tables, report.remarks, report.definitions)
            if self.markdown is not None and processes.is_main_process():
                write_file(self.markdown, to_markdown(report).encode())
        self.print_json(report.document)


def write_file(path: Path, content: bytes) -> None:
    """Writes a file. Raises CheckpointError if that fails."""
    with file_errors(path, f"{path} cannot be written"):
        path.write_bytes(content)
