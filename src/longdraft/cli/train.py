"""``longdraft train``: a command for each kind of draft, and the commands ``data`` and ``presets``."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from longdraft.bench.tables import new_table
from longdraft.cli import console, options, processes
from longdraft.cli.cancel import Cancel, interruptible
from longdraft.cli.method_options import train_commands
from longdraft.cli.progress import TrainingBar
from longdraft.errors import ConfigError, needs_extra

if TYPE_CHECKING:
    from longdraft.drafts.kinds import Training
    from longdraft.training.config import RunConfig


def _with_settings(title: str, get_config_class: Callable[[], type[Any]], base: type[Any] = TyperCommand) -> type[Any]:
    """Makes a command class whose help ends with a table of settings.

    Args:
        title: text above the table.
        get_config_class: returns the class that has the settings; called when the help is shown.
        base: class of commands, or of command groups.
    """

    class WithSettings(base):
        def format_help(self, ctx: Any, formatter: Any) -> None:
            from longdraft.training.config import settings_table

            super().format_help(ctx, formatter)
            table = new_table(["setting", "default"])
            table.add_column("values")
            table.add_column("meaning")
            for row in settings_table(get_config_class()):
                table.add_row(*map(Text, row))
            out = console.stdout()
            out.print(Text(f" Settings: {title}"))
            console.print_renderable(out, table)

    return WithSettings


_SETTINGS_TITLE = "those of every run; each kind has more: longdraft train KIND --help"
_RUN_CONFIG = partial(resolve_name, "longdraft.training.config:RunConfig")  # imports it when the help is shown


class TrainCommandGroup(_with_settings(_SETTINGS_TITLE, _RUN_CONFIG, TyperGroup)):  # type: ignore[misc]
    """The commands of ``longdraft train``: one for each kind of draft, ``data`` and ``presets``."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*train_commands(), *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)  # first, because it does not read the catalogue
        summary = None if command else train_commands().get(cmd_name)
        return command if summary is None else _make_command(cmd_name, summary)


def _get_training(command: str) -> Training:
    """Returns the training that a command of ``longdraft train`` runs."""
    from longdraft.registry import KINDS

    trainings = {kind.name: kind.training for kind in KINDS.values()}
    return next(t for name, t in trainings.items() if t is not None and command == (t.command or name))


def keep_user_files(ctx: typer.Context, user_files: options.UserFiles = None) -> None:
    """Train a draft for a model, or prepare its training data."""
    ctx.obj = user_files  # --load has run them; train() names them in its last message


def presets(
    name: Annotated[str | None, typer.Argument(help="Preset to print: a template for a file.", show_default="")] = None,
) -> None:
    """List the presets that --config takes, or print one."""
    from longdraft.training.config import preset_path, preset_paths

    if name is not None:
        console.print_line(preset_path(name).read_text(encoding="utf-8").rstrip())
        return
    table = new_table(["preset"])
    table.add_column()
    for preset, path in preset_paths().items():
        table.add_row(preset, Text(path.read_text(encoding="utf-8").splitlines()[0].removeprefix("#").strip()))
    console.print_renderable(console.stdout(), table)


def _make_command(name: str, summary: str) -> Any:
    """Makes the command ``name``, which trains a kind of draft. ``summary``: the first sentence of the help."""

    def train(
        ctx: typer.Context,
        *,
        settings: Annotated[
            list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that override those of --config.")
        ] = None,
        config: Annotated[
            Path | None,
            typer.Option("--config", "-c", help="YAML file of settings, or a preset (see `longdraft train presets`)."),
        ] = None,
        dry_run: Annotated[bool, typer.Option(help="Only estimate memory and hours of the run; do not train.")] = False,
        gpu: Annotated[str, typer.Option(help="For --dry-run: a100, b200, h100, h200, l40s or rtx4090.")] = "h100",
        gpus: Annotated[int, typer.Option(min=1, help="For --dry-run: number of GPUs.")] = 1,
        tokens: Annotated[
            float | None,
            typer.Option(min=1, help="For --dry-run: tokens in the loss, such as 6e9.", show_default="counted"),
        ] = None,
        output: options.OutputOptions,
    ) -> None:
        from longdraft.training.config import read_config

        training = _get_training(name)
        run_config: RunConfig = read_config(config, settings or [], training.load_settings())
        if dry_run:
            output.print_json(_show_estimate(name, run_config, gpu, gpus, tokens))
        else:
            _check_paths(run_config)
            _train(run_config, training, output, ctx.obj)

    title = "every setting, with its default and the values it takes (key=value, or YAML)"
    app = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command(
        name,
        cls=_with_settings(title, lambda: _get_training(name).load_settings()),
        help=f"{summary}; continues a run in the same folder. Ctrl-C writes a checkpoint and ends.",
    )(interruptible(options.expand_groups(train)))
    return typer.main.get_command(app)


def _check_paths(settings: RunConfig) -> None:
    """Raises ConfigError if there is no data, or a file or folder does not exist."""
    from longdraft.drafts import hub

    if not settings.data:
        raise ConfigError("No data: set data=text.jsonl, or in YAML data: [a.jsonl, b.jsonl.gz].")
    for source in (*settings.data, *settings.vocabulary_from):
        if not Path(source).exists():
            raise ConfigError(f"There is no file or folder {source}: check data and vocabulary_from.")
    if settings.init and not Path(hub.local_folder(settings.init)).is_dir():
        raise ConfigError(f"There is no draft folder {settings.init}: check init, or leave it out for a new draft.")


def _train(
    settings: RunConfig, training: Training, output: options.OutputOptions, user_files: list[Path] | None
) -> None:
    """Trains a draft, shows the steps, and prints where the draft is. ``user_files``: the files of --load."""
    is_main = processes.is_main_process()  # under torchrun or accelerate launch, only the main process prints progress
    with TrainingBar(silent=not is_main) as display:
        # Slow imports come after the check of settings.
        display.print_line("Loading torch and accelerate")
        with needs_extra("train", "Training needs the package accelerate"):
            run = training.load_run()
        report = None
        with Cancel(sigterm=True) as cancel:
            for report in run(settings, display.print_line, cancel):
                display.show_step(report)
    if not is_main:
        raise typer.Exit(cancel.exit_code if cancel() else 0)
    if cancel() and (report is None or report.step < report.steps):
        where = "before the first step" if report is None else f"after step {report.step:,} of {report.steps:,}"
        console.note(f"Stopped {where}. The same command continues from there.")
        raise typer.Exit(cancel.exit_code)
    best = Path(settings.out) / "best"
    flag_values = [("--model", settings.target), *(("--load", path) for path in user_files or ())]
    flags = "".join(f"{flag} {shlex.quote(str(value))} " for flag, value in flag_values if value)
    console.note(f"The draft is in {best} (the draft of the last step in {best.with_name('last')}). To use it:")
    console.note(f"  longdraft generate {flags}--draft {shlex.quote(str(best))} --prompt ...")
    payload: dict[str, Any] = {"draft": str(best)}
    if report is not None:
        simulated = None if report.simulated is None else vars(report.simulated)
        payload |= {"steps": report.steps, "loss": report.loss, "simulated": simulated}
    output.print_json(payload)


def _show_estimate(command: str, run_config: RunConfig, gpu: str, gpus: int, tokens: float | None) -> dict[str, Any]:
    """Prints and returns the estimate of a run (:func:`longdraft.training.dry_run.estimate`)."""
    from longdraft.memory.memory_info import format_bytes
    from longdraft.training.dry_run import GPUS, estimate

    estimated = estimate(command, run_config, gpu, gpus, tokens)
    speed, gpu_bytes = GPUS[gpu]
    table = new_table(["memory of a GPU"], [""])
    for part, num_bytes in estimated["memory_bytes"].items():
        table.add_row(part, format_bytes(num_bytes))
    fits = "fits" if estimated["fits"] else "does not fit"
    verdict = f"{format_bytes(estimated['total_bytes'])} of {format_bytes(int(gpu_bytes))}: {fits}"
    table.add_row(Text("together", style="bold"), Text(verdict, style="bold"))
    cost = f"{estimated['tokens'] / 1e9:.2f}B tokens, {estimated['hours']:,.1f} hours"
    steps = "steps unknown without --tokens" if not estimated["steps"] else f"{estimated['steps']:,} steps"
    draft_gflop, target_gflop = (estimated[f"{part}_operations"] / 1e9 for part in ("draft", "target"))
    hint = "" if estimated["fits"] else " To need less, set recompute=true, or smaller rows or max_length."
    definitions = [
        f"Hours are an estimate: {estimated['utilisation']:.0%} of a {gpu}'s {speed / 1e12:,.0f} bfloat16 TFLOP/s; a "
        f"token takes {draft_gflop:.2f} GFLOP of the draft and {target_gflop:.2f} of the target. The target reads "
        f"every text {'once' if estimated['target_reads'] < 1 else 'each time'}.",
        f"Memory is for documents of max_length tokens, all in the loss. Every GPU holds the whole target.{hint}",
    ]
    weights = f"{estimated['draft_weights'] / 1e6:,.1f}M weights to train, {estimated['step_tokens']:,} tokens a step"
    if estimated["cache_bytes"] is not None:
        definitions.append(
            f"cache: {format_bytes(estimated['cache_bytes'])} on disk for these tokens, "
            f"{estimated['feature_bytes']:,} bytes each. Without it the target reads every text in every epoch."
        )
    console.print_report([(f"{weights}: {steps}, {cost}", table)], definitions=definitions)
    return estimated
