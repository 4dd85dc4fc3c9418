"""``longdraft train``: training runs, and the data for them."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from longdraft.cli import console, options
from longdraft.cli.cancel import Cancel, interruptible
from longdraft.cli.settings_help import with_settings
from longdraft.cli.training_display import TrainingDisplay
from longdraft.errors import CapabilityError, ConfigError, PromptError

if TYPE_CHECKING:
    from longdraft.drafts.kinds import Training
    from longdraft.training.config import RunConfig
    from longdraft.training.settings import Described


def common_settings() -> list[Described]:
    from longdraft.training.config import RunConfig
    from longdraft.training.settings import described

    return described(RunConfig)


_TITLE = "those of every run; each kind has more: longdraft train KIND --help"


class Trainers(with_settings(common_settings, _TITLE, TyperGroup)):  # type: ignore[misc]
    """The commands: one for each kind of draft that can be trained, those of ``--load`` included, and ``data``."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*_trainings(), *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name == "mtp":
            raise options.SettingError(
                "train mtp: drafts around a model's own last layer are no longer trained; take eagle3 or lm."
            )
        found = super().get_command(ctx, cmd_name)  # first, as it needs no catalogue
        training = None if found else _trainings().get(cmd_name)
        return found if training is None else _command(cmd_name, training)


def _trainings() -> dict[str, Training]:
    """The training of each kind of draft, by the name of its command."""
    from longdraft.drafts.kinds import KINDS

    return {kind.training.command or kind.name: kind.training for kind in KINDS.values() if kind.training is not None}


def loaded_first(composed: options.Load = None) -> None:
    """Train a draft for a model, and prepare what it learns from."""


def _command(name: str, training: Training) -> Any:
    def train(
        *,
        settings: Annotated[
            list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that override the file's.")
        ] = None,
        config: Annotated[
            Path | None, typer.Option("--config", "-c", help="YAML file of settings, such as those in configs/.")
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
        output: options.Output,
    ) -> None:
        if dry_run:
            from longdraft.cli.dry_run import show

            output.json(show(name, _read(config, settings or [], training), gpu, gpus, tokens))
        else:
            _train(config, settings or [], training, output)

    def settings_of() -> list[Described]:
        from longdraft.training.settings import described

        return described(training.load_settings())

    alone = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    alone.command(
        name,
        cls=with_settings(settings_of, "every setting, with its default and the values it takes (key=value, or YAML)"),
        help=f"{training.summary}; continues the run in its folder if there is one. Ctrl-C writes a checkpoint first.",
    )(interruptible(options.spread(train)))
    return typer.main.get_command(alone)


def _train(path: Path | None, words: list[str], training: Training, output: options.Output) -> None:
    """Reads the settings, trains, shows the steps, and prints where the draft is."""
    # Of several processes (torchrun, accelerate launch) only the first prints.
    main = int(os.environ.get("RANK", "0")) == 0
    try:
        settings_ = _read(path, words, training)
        if not settings_.data:
            raise ConfigError("No data: name JSONL files, as in data=text.jsonl, or data: [a.jsonl, b.jsonl.gz].")
        for source in (*settings_.data, *settings_.vocabulary_from):
            _check_source(source)
        if settings_.init and not Path(settings_.init).is_dir():
            raise ConfigError(
                f"There is no draft folder {settings_.init}: check init, or leave it out for a new draft."
            )
    except ConfigError:
        if main:
            raise
        raise typer.Exit(2) from None
    if find_spec("accelerate") is None:
        raise CapabilityError('Training needs the package accelerate: pip install "longdraft[train]"')
    with TrainingDisplay(silent=not main) as display:
        # After the settings are checked, because this takes seconds.
        display.prepare("Loading what training needs", 0, 0)
        run = training.load_run()
        report = None
        with Cancel(terminate=True) as cancel:
            for report in run(settings_, display.prepare, cancel):
                display.step(report)
    if not main:
        raise typer.Exit(cancel.exit_code if cancel() else 0)
    if cancel() and (report is None or report.step < report.steps):
        where = "before the first step" if report is None else f"after step {report.step:,} of {report.steps:,}"
        console.note(f"Stopped {where}. The same command continues from there.")
        raise typer.Exit(cancel.exit_code)
    best = Path(settings_.out) / "best"
    target = f"--model {settings_.target} " if settings_.target else ""
    console.note(f"The draft is in {best} (the last step's in {best.with_name('last')}). Use it:")
    console.note(f"  longdraft generate {target}--draft {best} --prompt ...")
    payload: dict[str, Any] = {"draft": str(best)}
    if report is not None:
        simulated = None if report.simulated is None else vars(report.simulated)
        payload |= {"steps": report.steps, "loss": report.loss, "simulated": simulated}
    output.json(payload)


def _read(path: Path | None, words: list[str], training: Training) -> RunConfig:
    from longdraft.training.settings import read_config

    found: RunConfig = read_config(path, words, training.load_settings())
    return found


def _check_source(source: str) -> None:
    """Raises ConfigError if a file, a corpus or a folder of tokens is not there."""
    from longdraft.training import corpora, tokens

    try:
        place = corpora.named(source).place
    except PromptError as error:
        raise ConfigError(f"{source}: {error}") from None
    if place.is_dir() and str(place) == source and not tokens.is_shards(place):
        raise ConfigError(
            f"{source} is a folder, but not one of tokens. Encode its text (`longdraft train data --kind tokens`), or "
            f"name its corpus, as in {next(iter(corpora.NAMES))}:{source} ({', '.join(corpora.NAMES)})."
        )
    if not place.exists():
        raise ConfigError(f"There is no file {source}: check data and vocabulary_from.")
