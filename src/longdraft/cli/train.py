"""``longdraft train``: training runs, and the data for them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from longdraft.cli import console, options
from longdraft.cli.cancel import Cancel, interruptible
from longdraft.cli.method_options import train_commands
from longdraft.cli.progress import TrainingBar
from longdraft.errors import CapabilityError, ConfigError

if TYPE_CHECKING:
    from longdraft.drafts.kinds import Training
    from longdraft.training.config import RunConfig


def _with_settings(title: str, config: Callable[[], type[Any]], base: type[Any] = TyperCommand) -> type[Any]:
    """A command class whose help ends with a table of settings.

    Args:
        config: returns the class that has them; called when the help is shown.
    """

    class Documented(base):
        def format_help(self, ctx: Any, formatter: Any) -> None:
            from longdraft.training.config import settings_table

            super().format_help(ctx, formatter)
            table = Table(box=box.SIMPLE, pad_edge=False)
            table.add_column("setting", style="bold cyan", no_wrap=True)
            table.add_column("default", no_wrap=True)
            table.add_column("values")
            table.add_column("meaning", ratio=1)
            for each in settings_table(config()):
                table.add_row(*map(Text, each))
            out = console.stdout()
            out.print(Text(f" Settings: {title}"))
            console.print_renderable(out, table)

    return Documented


_TITLE = "those of every run; each kind has more: longdraft train KIND --help"
_OF_EVERY_RUN = partial(resolve_name, "longdraft.training.config:RunConfig")


class TrainCommandGroup(_with_settings(_TITLE, _OF_EVERY_RUN, TyperGroup)):  # type: ignore[misc]
    """The commands: one for each kind of draft that can be trained, those of ``--load`` included, and ``data``."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*train_commands(), *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)  # first, as it needs no catalogue
        summary = None if found else train_commands().get(cmd_name)
        return found if summary is None else _command(cmd_name, summary)


def _training(command: str) -> Training:
    """The training that a command runs."""
    from longdraft.drafts.kinds import KINDS

    found = {kind.name: kind.training for kind in KINDS.values()}
    return next(each for name, each in found.items() if each is not None and command == (each.command or name))


def load_user_files(ctx: typer.Context, composed: options.Load = None) -> None:
    """Train a draft for a model, and prepare what it learns from."""
    ctx.obj = composed


def presets(
    name: Annotated[
        str | None, typer.Argument(help="Print this one, as a start for your own.", show_default="")
    ] = None,
) -> None:
    """List the files of settings that --config takes by name, or print one."""
    from longdraft.training.config import preset_path
    from longdraft.training.config import preset_paths as known

    if name is not None:
        console.print_line(preset_path(name).read_text(encoding="utf-8").rstrip())
        return
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("preset", no_wrap=True)
    table.add_column("", ratio=1)
    for each, path in known().items():
        first = path.read_text(encoding="utf-8").splitlines()[0]
        table.add_row(each, Text(first.removeprefix("#").strip()))
    console.print_renderable(console.stdout(), table)


def _command(name: str, summary: str) -> Any:
    def train(
        ctx: typer.Context,
        *,
        settings: Annotated[
            list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that override the file's.")
        ] = None,
        config: Annotated[
            Path | None,
            typer.Option("--config", "-c", help="YAML file of settings, or a preset: longdraft train presets."),
        ] = None,
        dry_run: Annotated[
            bool,
            typer.Option(help="Only show what the run would take of memory and time: no weights, no GPU, no training."),
        ] = False,
        gpu: Annotated[str, typer.Option(help="GPU of a dry run: a100, b200, h100, h200, l40s, rtx4090.")] = "h100",
        gpus: Annotated[int, typer.Option(min=1, help="GPUs of a dry run.")] = 1,
        tokens: Annotated[
            float | None,
            typer.Option(min=1, help="Learned tokens of a dry run's data, as in 6e9.", show_default="those of data"),
        ] = None,
        output: options.OutputOptions,
    ) -> None:
        from longdraft.training.config import read_config

        training = _training(name)
        # Of several processes (torchrun, accelerate launch) only the first prints.
        main = int(os.environ.get("RANK", "0")) == 0
        try:
            found: RunConfig = read_config(config, settings or [], training.load_settings())
            if not dry_run:
                _check(found)
        except ConfigError:
            if main:
                raise
            raise typer.Exit(2) from None
        if dry_run:
            output.print_json(_estimated(name, found, gpu, gpus, tokens))
        else:
            _train(found, training, output, main, ctx.obj)

    title = "every setting, with its default and the values it takes (key=value, or YAML)"
    alone = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    alone.command(
        name,
        cls=_with_settings(title, lambda: _training(name).load_settings()),
        help=f"{summary}; continues the run in its folder if there is one. Ctrl-C writes a checkpoint first.",
    )(interruptible(options.expand_groups(train)))
    return typer.main.get_command(alone)


def _check(settings: RunConfig) -> None:
    """Raises ConfigError if there are no data, or a file or folder that is named is not there."""
    from longdraft.drafts import hub

    if not settings.data:
        raise ConfigError("No data: name JSONL files, as in data=text.jsonl, or data: [a.jsonl, b.jsonl.gz].")
    for source in (*settings.data, *settings.vocabulary_from):
        if not Path(source).exists():
            raise ConfigError(
                f"There is no file {source}: check data and vocabulary_from. A corpus goes by its folder."
            )
    if settings.init and not Path(hub.local_folder(settings.init)).is_dir():
        raise ConfigError(f"There is no draft folder {settings.init}: check init, or leave it out for a new draft.")


def _train(
    settings: RunConfig, training: Training, output: options.OutputOptions, main: bool, loaded: list[Path] | None
) -> None:
    """Trains, shows the steps, and prints where the draft is. ``loaded``: files of kinds."""
    if find_spec("accelerate") is None:
        raise CapabilityError('Training needs the package accelerate: pip install "longdraft[train]"')
    with TrainingBar(silent=not main) as display:
        # After the settings are checked, because this takes seconds.
        display.print_line("Loading what training needs")
        run = training.load_run()
        report = None
        with Cancel(sigterm=True) as cancel:
            for report in run(settings, display.print_line, cancel):
                display.show_step(report)
    if not main:
        raise typer.Exit(cancel.exit_code if cancel() else 0)
    if cancel() and (report is None or report.step < report.steps):
        where = "before the first step" if report is None else f"after step {report.step:,} of {report.steps:,}"
        console.note(f"Stopped {where}. The same command continues from there.")
        raise typer.Exit(cancel.exit_code)
    best = Path(settings.out) / "best"
    given = [("--model", settings.target), *(("--load", path) for path in loaded or ())]
    flags = "".join(f"{flag} {shlex.quote(str(value))} " for flag, value in given if value)
    console.note(f"The draft is in {best} (the last step's in {best.with_name('last')}). Use it:")
    console.note(f"  longdraft generate {flags}--draft {shlex.quote(str(best))} --prompt ...")
    payload: dict[str, Any] = {"draft": str(best)}
    if report is not None:
        simulated = None if report.simulated is None else vars(report.simulated)
        payload |= {"steps": report.steps, "loss": report.loss, "simulated": simulated}
    output.print_json(payload)


def _estimated(kind: str, config: RunConfig, gpu: str, gpus: int, data: float | None) -> dict[str, Any]:
    """Prints what a run would take; returns its figures (:func:`longdraft.training.dry_run.estimate`)."""
    from longdraft.memory.memory_info import format_bytes
    from longdraft.training.dry_run import GPUS, estimate

    found = estimate(kind, config, gpu, gpus, data)
    speed, room = GPUS[gpu]
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("memory of a GPU")
    table.add_column("", justify="right")
    for part, size in found["memory_bytes"].items():
        table.add_row(part, format_bytes(size))
    verdict = f"{format_bytes(found['total_bytes'])} of {format_bytes(int(room))}: {'fits' if found['fits'] else 'does not fit'}"
    table.add_row(Text("together", style="bold"), Text(verdict, style="bold"))
    tokens = f"{found['tokens'] / 1e9:.2f}B tokens, {found['hours']:,.1f} hours"
    run = f"{found['steps']:,} steps, {tokens}" if found["steps"] else f"steps unknown without --tokens; {tokens}"
    definitions = [
        f"Hours are an estimate: {found['utilisation']:.0%} of a {gpu}'s {speed / 1e12:,.0f} bfloat16 TFLOP/s; a token "
        f"takes {found['draft_operations'] / 1e9:.2f} GFLOP of the draft and {found['target_operations'] / 1e9:.2f} of "
        f"the target, which reads every text {'once' if found['target_reads'] < 1 else 'each time'}.",
        "Memory is of texts of max_length tokens, all learned. Every GPU holds the whole target."
        + ("" if found["fits"] else " Less: recompute=true, smaller rows (with more accumulate), shorter max_length."),
    ]
    weights = f"{found['draft_weights'] / 1e6:,.1f}M weights to train, {found['step_tokens']:,} tokens a step"
    if found["cache_bytes"] is not None:
        definitions.append(
            f"cache: {format_bytes(found['cache_bytes'])} on disk for these tokens, {found['feature_bytes']:,} bytes each. "
            "Without it the target reads every text in every epoch."
        )
    console.print_report([(f"{weights}: {run}", table)], definitions=definitions)
    return found
