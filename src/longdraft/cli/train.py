"""``longdraft train``: training runs, and the data for them."""

from __future__ import annotations

import os
from enum import Enum
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from longdraft.cli import console, method_options, options
from longdraft.cli.cancel import Cancel, interruptible
from longdraft.cli.settings_help import with_settings
from longdraft.cli.training_display import Counter, TrainingDisplay
from longdraft.drafts.kinds import KINDS, Training
from longdraft.errors import CapabilityError, CheckpointError, ConfigError, PromptError

if TYPE_CHECKING:
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
        training = _trainings().get(cmd_name)
        return super().get_command(ctx, cmd_name) if training is None else _command(cmd_name, training)


def _trainings() -> dict[str, Training]:
    """The training of each kind of draft, by the name of its command."""
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

            output.json(show(training, _read(config, settings or [], training), gpu, gpus, tokens))
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


# Default number of answers, or of texts that repeat themselves.
ROWS = 1000


class Kind(str, Enum):
    """The kinds of rows that ``train data`` writes."""

    answers = "answers"
    tokens = "tokens"
    repeats = "repeats"


def data(
    *,
    files: Annotated[
        list[Path],
        typer.Argument(help="JSONL, parquet: rows with `text`, for tokens also chats; or a corpus: pg19:FOLDER."),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="JSONL file to write, or to continue; for tokens also a folder.")
    ],
    kind: Annotated[
        Kind,
        typer.Option(
            help="answers: the target's answers about passages of the text; tokens: the rows, encoded; repeats: texts "
            "of passages and facts that come twice, from which a small language model learns to copy."
        ),
    ] = Kind.answers,
    target: Annotated[
        str | None,
        typer.Option("--target", "-m", help="A Hugging Face id, a folder or a .gguf file.", show_default="embedded"),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(min=1, help="Rows of the file in the end: answers or texts.", show_default=f"{ROWS}; tokens: all"),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Answers decoded at a time.")] = 96,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Tokens of an answer, at most.")] = 256,
    features: Annotated[
        bool, typer.Option(help="Keep the features that drafts read beside the file, for training.")
    ] = True,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Decoder layers whose hidden states are kept.", show_default="those of EAGLE-3, and the last"
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many of the target's likeliest tokens are kept.")] = 8,
    passage_tokens: Annotated[str, typer.Option(metavar="MIN,MAX", help="Length of a passage.")] = "200,1500",
    per_passage: Annotated[int, typer.Option(min=1, help="Answers to each passage.")] = 24,
    temperatures: Annotated[str, typer.Option(help="Temperatures of a passage's answers, repeated.")] = "0,0,1",
    method: Annotated[str | None, typer.Option(hidden=True)] = None,
    seed: Annotated[int, typer.Option(help="Seed of passages, prompts and sampling.")] = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    threads: options.Threads = None,
    output: options.Output,
) -> None:
    """Prepare training data: the target's own answers, or text and chats turned into tokens once and for all."""
    lengths = method_options.whole_numbers("--passage-tokens", passage_tokens)
    answer_temperatures = method_options.numbers("--temperatures", temperatures)
    chosen_layers = None if layers is None else method_options.whole_numbers("--layers", layers)
    if len(lengths) != 2 or not 0 < lengths[0] <= lengths[1]:
        raise options.SettingError(f"--passage-tokens takes two numbers, as in 200,1500, not {passage_tokens!r}.")
    if not answer_temperatures or min(answer_temperatures) < 0:
        raise options.SettingError("--temperatures takes numbers from 0 on.")
    if method is not None:
        console.note("--method is ignored: dozens of answers are decoded together, which needs no draft.")
    shards = kind is Kind.tokens and not out.name.endswith(".jsonl")
    if (out.is_dir() and not shards) or not out.absolute().parent.is_dir():
        raise CheckpointError(f"--out {out}: its folder does not exist, or it is a folder itself.")

    import torch

    from longdraft.drafts.eagle_formats import usual_layers
    from longdraft.model.loading import load
    from longdraft.model.runner import TargetRunner
    from longdraft.model.stored import weight_shape
    from longdraft.training import documents, generations, prompts, repeats, tokens
    from longdraft.training.kept_features import KeptFeatures

    total = ROWS if rows is None else rows
    skipped = documents.Skipped()
    texts: list[str] = []
    if kind is not Kind.tokens:  # before the model is loaded, so that a wrong path is reported at once
        for row in documents.rows(files, skipped):
            if isinstance(row.get("text"), str):
                texts.append(row["text"])
            else:
                skipped.add("without text")
    if kind is Kind.repeats:
        have = documents.write(repeats.repeats(texts, total, seed), out)
        _written(out, have, skipped, output)
        return
    if threads:
        torch.set_num_threads(threads)
    with console.status() as status:
        loaded = load(target, dtype=dtype, device=device, progress=status)
    with Cancel(terminate=True) as cancel:
        if kind is Kind.tokens:
            vocabulary = weight_shape(loaded.model.get_output_embeddings())[0]
            with Counter("Encoding", "rows") as counter:
                if shards:
                    done = tokens.rows_done(out)
                    encoded = documents.encoded(files, loaded.tokenizer, skipped, vocabulary, done)
                    left = None if rows is None else max(0, rows - done)
                    have = tokens.write(out, islice(encoded, left), loaded.tokenizer, counter.update, cancel)
                else:
                    found = documents.documents(files, loaded.tokenizer, skipped, vocabulary)
                    have = documents.write(islice(found, rows), out, counter.update, cancel)
        else:
            runner = TargetRunner(loaded.model)
            kept = None
            if features:
                count = runner.depth
                if chosen_layers and not {*range(count)}.issuperset(chosen_layers):
                    raise options.SettingError(f"--layers takes layers from 0 to {count - 1}, not {layers!r}.")
                # In a shallow target some of the usual layers are negative.
                usual = [layer for layer in (*usual_layers(count), count - 1) if layer >= 0]
                kept_layers = sorted({*(chosen_layers or usual)})
                kept = KeptFeatures(documents.features_of(out), runner.parts.description, kept_layers, top)
            together = min(batch, per_passage)
            passages = prompts.asks(texts, (lengths[0], lengths[1]), per_passage, answer_temperatures, seed)
            with Counter("The target answers", "rows", total) as counter:
                have = generations.generate(
                    runner, loaded.tokenizer, passages, out, places=batch // together, per_passage=together,
                    max_new_tokens=max_tokens, total=total, seed=seed, features=kept, progress=counter.update,
                    stop=cancel,
                )  # fmt: skip
    if cancel():
        if skipped.total:
            console.note(f"Left out: {skipped}.")
        goes_on = kind is Kind.answers or shards
        rest = "The same command continues from there." if goes_on else "Nothing written."
        console.note(f"Stopped. {rest}")
        raise typer.Exit(cancel.exit_code)
    _written(out, have, skipped, output)


def _written(out: Path, rows: int, skipped: Any, output: options.Output) -> None:
    if skipped.total:
        console.note(f"Left out: {skipped}.")
    console.note(f"{out}: {rows:,} rows. Train on them: longdraft train longspec --config FILE data={out}")
    output.json({"out": str(out), "rows": rows, "left_out": skipped.reasons})
