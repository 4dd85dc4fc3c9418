"""Terminal output: results go to stdout, notes and progress to stderr."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.text import Text

# Columns if the output is no terminal. rich would take 80 and cut tables.
NO_TERMINAL_WIDTH = 200

# Consoles are made at each use, because tests and torchrun replace the streams.


def stdout() -> Console:
    return _console(stderr=False)


def stderr() -> Console:
    return _console(stderr=True)


def _console(stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = NO_TERMINAL_WIDTH
    return console


def has_colors(console: Console) -> bool:
    """True for a terminal with colours, unless NO_COLOR is set."""
    capable = console.is_terminal and console.color_system is not None and not console.legacy_windows
    return capable and not console.no_color


def print_renderable(target: Console, renderable: RenderableType) -> None:
    """Prints a table or another renderable, without trailing blanks if the output is no terminal."""
    if target.is_terminal:
        # A table that is too wide wraps, instead of losing columns.
        width = max(target.width, target.measure(renderable).minimum)
        target.print(renderable, soft_wrap=False, width=width, crop=False)
        return
    with target.capture() as captured:
        target.print(renderable)
    target.file.write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))
    target.file.flush()


def print_report(
    tables: Iterable[tuple[str, RenderableType]], remarks: Iterable[Text] = (), definitions: Iterable[str] = ()
) -> None:
    """Prints tables under their titles, then remarks and the definitions of the figures, on stdout."""
    out = stdout()
    for title, table in tables:
        out.print(Text(title, style="bold"))
        print_renderable(out, table)
        out.print()
    for remark in (*remarks, *(Text(line, style="dim") for line in definitions)):
        out.print(remark)


def note(message: str) -> None:
    """Prints a line on stderr."""
    stderr().print(Text(message, style="dim"))


def error(message: str) -> None:
    """Prints an error on stderr, in red and on one line."""
    stderr().print(Text("error: " + " ".join(message.split()), style="red"))


def print_line(text: str) -> None:
    """Prints a line on stdout, without markup."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def progress_bar(share: float, width: int = 20) -> Text:
    """A bar for a share of 0 to 1."""
    done = round(min(max(share, 0.0), 1.0) * width)
    return Text.assemble(("━" * done, "green"), ("━" * (width - done), "dim"))


class Status:
    """Shows messages on stderr: a spinner on a terminal, else a line each. Close it before anything is timed, because
    the spinner's thread wakes up many times a second."""

    def __init__(self) -> None:
        self._console, self._last = stderr(), ""
        self._spinner = self._console.status(Text("")) if self._console.is_terminal else None

    def __call__(self, message: str) -> None:
        text, share = Text(message + " ..."), getattr(message, "share", None)
        if self._spinner is not None:
            self._spinner.update(text if share is None else Text.assemble(progress_bar(share), " ", text))
            self._spinner.start()
        elif share is None or message != self._last:
            self._console.print(text)
        self._last = message

    def close(self) -> None:
        if self._spinner is not None:
            self._spinner.stop()


@contextmanager
def status() -> Iterator[Status]:
    """A :class:`Status` that is closed at the end."""
    spinner = Status()
    try:
        yield spinner
    finally:
        spinner.close()


@contextmanager
def warnings_once() -> Iterator[None]:
    """Shows each warning of the package once: every run has a new drafter, which would repeat it."""
    seen: set[object] = set()

    def is_new(record: logging.LogRecord) -> bool:
        repeated = record.msg in seen
        seen.add(record.msg)
        return not repeated

    logger = logging.getLogger("longdraft")
    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)


# Python's names of arguments -> flags. "--top-k" is an option of sampling, "--tree-top-k" of trees.
_FLAGS = {
    name: f"--{name.replace('_', '-')}"
    for name in (
        "arithmetic", "batch", "depth", "device", "draft", "dtype", "kv_dtype", "min_p", "nodes", "offload", "plan",
        "repetition_penalty", "repetition_window", "rope_factor", "seed", "stop", "temperature", "threshold", "top_p",
        "tree", "weights", "widths",
    )
} | {"max_new_tokens": "--max-tokens", "top_k": "--tree-top-k"}  # fmt: skip
# How an error about an argument's value continues after the argument's name.
_VERB = r"(?=(?: '[^']*')? (?:must|cannot|takes?|is|are|has|says|needs|shapes?)\b)"
_ARGUMENT = re.compile(rf"(?:{'|'.join(_FLAGS)}){_VERB}")


def with_flag_names(message: str) -> str:
    """Replaces the argument's name, with which an error about its value begins, by the flag."""
    match = _ARGUMENT.match(message)
    return message if match is None else _FLAGS[match[0]] + message[match.end() :]
