"""The command ``longdraft``: its subcommands, and how errors end them."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from longdraft.cli import console, options, processes
from longdraft.cli.acceptance import acceptance, bench_length
from longdraft.cli.batch import batch
from longdraft.cli.bench import bench
from longdraft.cli.cancel import interruptible
from longdraft.cli.chat import chat
from longdraft.cli.doctor import doctor
from longdraft.cli.export import export
from longdraft.cli.generate import generate
from longdraft.cli.methods import methods
from longdraft.cli.quality import quality
from longdraft.cli.reproduce import reproduce
from longdraft.cli.serve import serve
from longdraft.cli.train import TrainCommandGroup, keep_user_files, presets
from longdraft.cli.train_data import data
from longdraft.errors import CapabilityError, ConfigError, LongdraftError, memory_checked

# click's UsageError. Newer versions of typer have their own copy of click, so its class is taken from typer.
USAGE_ERROR: Any = typer.BadParameter.__base__


class CommandGroup(TyperGroup):
    """Subcommands with names of one or two words: both ``bench`` and ``bench quality`` are commands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        two_words = " ".join(args[:2])
        if len(args) > 1 and two_words in self.commands:
            return two_words, self.commands[two_words], args[2:]
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        return [item for item in super().shell_complete(ctx, incomplete) if " " not in item.value]


class Subcommand(TyperCommand):
    """A subcommand of one word. After ``bench``, shells also complete second words, such as ``quality``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except USAGE_ERROR as error:
            if ctx.info_name == "generate" and "extra argument" in error.message:  # `longdraft generate PROMPT`
                error.message += ". Write the prompt after -p: -p 'Summarise this.'"
            raise

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        items = super().shell_complete(ctx, incomplete)
        item_class = type(super().shell_complete(ctx, "--help")[0])  # CompletionItem of the click that typer uses
        second_words = [name.split()[1] for name in ctx.parent.command.commands if name.startswith(f"{ctx.info_name} ")]
        return [*items, *(item_class(word) for word in second_words if word.startswith(incomplete))]


app = typer.Typer(
    cls=CommandGroup,
    help="Long-context text generation, faster: speculative decoding on Hugging Face models as they are.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # main() prints errors in one line; --debug adds a plain traceback
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

# Panels of ``longdraft --help``.
WRITE, LOOK, MEASURE, TRAIN = "Write", "Look around", "Measure", "Train and export"
for command, panel in (
    (processes.distributed(generate), WRITE), (chat, WRITE), (serve, WRITE), (batch, WRITE),
    (methods, LOOK), (doctor, LOOK), (processes.distributed(bench), MEASURE), (reproduce, MEASURE),
    (export, TRAIN),
):  # fmt: skip
    app.command(rich_help_panel=panel, cls=Subcommand)(interruptible(options.expand_groups(command)))
for name, command in (("acceptance", acceptance), ("length", bench_length), ("quality", quality)):
    app.command(f"bench {name}", rich_help_panel=MEASURE)(interruptible(options.expand_groups(command)))

training = typer.Typer(cls=TrainCommandGroup, no_args_is_help=True)
training.callback()(keep_user_files)
training.command()(interruptible(options.expand_groups(data)))
training.command()(interruptible(presets))
app.add_typer(training, name="train", rich_help_panel=TRAIN)

BAD_SETTING, FAILED = 2, 1  # exit codes
_STDOUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EBADF)


def _print_version(requested: bool) -> None:
    if requested:
        from longdraft import __version__

        console.print_line(f"longdraft {__version__}")
        raise typer.Exit


@app.callback()
def _root_options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: options.Debug = False,
) -> None:
    processes.check_verb(context.invoked_subcommand)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line. Returns the exit code: 0, 2 for a bad setting, 1 for a failure, 130 for Ctrl-C."""
    options.reset_debug()
    if sys.stdout is None:  # stdout is closed: reserve its descriptor, and let writing fail
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    console.announce_loading()
    code = _run_app(arguments)
    console.end_loading()
    try:
        sys.stdout.flush()
    except OSError as error:
        code = code or _stdout_failed(error)
    return code


def _run_app(arguments: Sequence[str] | None) -> int:
    try:
        with memory_checked():
            app(args=None if arguments is None else list(arguments), prog_name="longdraft")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as error:
        # An OSError about a file has the file's name; without a name, it is about stdout.
        if isinstance(error, OSError) and error.errno in _STDOUT_ERRORS and error.filename is None:
            return _stdout_failed(error)
        return _report_error(error)
    return 0


def _stdout_failed(error: OSError) -> int:
    """Handles a command that cannot write to stdout. Redirects stdout, because Python flushes it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno != errno.EPIPE:  # EPIPE is no error: the reader of the pipe has ended (`| head`)
        console.error(f"stdout cannot be written: {error.strerror}.")
    return FAILED


def _report_error(error: Exception) -> int:
    """Prints an error that ended a command, and returns the exit code."""
    if options.debugging():
        traceback.print_exception(error)
    if isinstance(error, LongdraftError):
        code = BAD_SETTING if isinstance(error, ValueError | CapabilityError) else FAILED
        if code == BAD_SETTING and not processes.is_main_process():
            return code  # the main process prints the error
        # Settings of a training run are not flags, so their names stay as they are.
        console.error(str(error) if isinstance(error, ConfigError) else console.with_flag_names(str(error)))
        return code
    hint = "" if options.debugging() else " Add --debug for a traceback."
    console.error(f"unexpected {type(error).__name__}: {error}.{hint}")
    return FAILED


def run() -> None:
    """Runs the command line and exits: the entry point of the installed script."""
    sys.exit(main())
