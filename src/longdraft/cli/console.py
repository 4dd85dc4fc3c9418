"""Output: results go to stdout, everything said about them to stderr."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.text import Text

# Columns of what is no terminal: rich would take 80 and cut tables there.
NO_TERMINAL_WIDTH = 200

# Consoles are made when they are needed: the streams may have been replaced since this file was imported.


def stdout() -> Console:
    return _console(stderr=False)


def stderr() -> Console:
    return _console(stderr=True)


def _console(stderr: bool) -> Console:
    made = Console(stderr=stderr, highlight=False, soft_wrap=True)
    if not made.is_terminal:
        made.width = NO_TERMINAL_WIDTH
    return made


def has_colors(console: Console) -> bool:
    """True for a terminal with colours, unless NO_COLOR is set."""
    able = console.is_terminal and console.color_system is not None and not console.legacy_windows
    return able and not console.no_color


def print_renderable(target: Console, renderable: RenderableType) -> None:
    """Prints a table or the like, without the blanks that rich pads its lines with where nobody sees them."""
    if target.is_terminal:
        # What is too wide for the terminal goes on in its next line, rather than lose columns.
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
    """Tables on stdout, each under its title; remarks; and what the figures mean."""
    out = stdout()
    for title, table in tables:
        out.print(Text(title, style="bold"))
        print_renderable(out, table)
        out.print()
    for remark in (*remarks, *(Text(line, style="dim") for line in definitions)):
        out.print(remark)


def note(message: str) -> None:
    """A line on stderr."""
    stderr().print(Text(message, style="dim"))


def error(message: str) -> None:
    """A red line on stderr, on one line whatever the message holds."""
    stderr().print(Text("error: " + " ".join(message.split()), style="red"))


def print_line(text: str) -> None:
    """A line on stdout, as it is."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def progress_bar(share: float, width: int = 20) -> Text:
    """A share of something as a bar."""
    done = round(min(max(share, 0.0), 1.0) * width)
    return Text.assemble(("━" * done, "green"), ("━" * (width - done), "dim"))


class Status:
    """Shows on stderr what is being done: a line with a spinner on a terminal, which wakes up many times a second, so
    not while something is timed; else a line each."""

    def __init__(self) -> None:
        self._console, self._said = stderr(), ""
        self._spinner = self._console.status(Text("")) if self._console.is_terminal else None

    def __call__(self, message: str) -> None:
        text, share = Text(message + " ..."), getattr(message, "share", None)
        if self._spinner is not None:
            self._spinner.update(text if share is None else Text.assemble(progress_bar(share), " ", text))
            self._spinner.start()
        elif share is None or message != self._said:
            self._console.print(text)
        self._said = message

    def close(self) -> None:
        if self._spinner is not None:
            self._spinner.stop()


@contextmanager
def status() -> Iterator[Status]:
    """Says what takes seconds, for as long as it takes."""
    shown = Status()
    try:
        yield shown
    finally:
        shown.close()


@contextmanager
def warnings_once() -> Iterator[None]:
    """Inside it, each warning of the package is said once: every run has a fresh drafter, which would warn anew."""
    said: set[object] = set()

    def new(record: logging.LogRecord) -> bool:
        told = record.msg in said
        said.add(record.msg)
        return not told

    logger = logging.getLogger("longdraft")
    logger.addFilter(new)
    try:
        yield
    finally:
        logger.removeFilter(new)


# Names of arguments in Python that are flags here; "--top-k" is of sampling.
_FLAGS = {
    name: f"--{name.replace('_', '-')}"
    for name in (
        "arithmetic", "batch", "depth", "device", "draft", "dtype", "kv_dtype", "min_p", "nodes", "offload", "plan",
        "repetition_penalty", "repetition_window", "rope_factor", "seed", "stop", "temperature", "threshold", "top_p",
        "tree", "weights", "widths",
    )
} | {"max_new_tokens": "--max-tokens", "top_k": "--tree-top-k"}  # fmt: skip
# How errors go on that are about an argument's value.
_SAID = r"(?=(?: '[^']*')? (?:must|cannot|takes?|is|are|has|says|needs|shapes?)\b)"
_ARGUMENT = re.compile(rf"(?:{'|'.join(_FLAGS)}){_SAID}")


def with_flag_names(message: str) -> str:
    """A message about the value of an argument, which it names first, with the flag in the name's place."""
    found = _ARGUMENT.match(message)
    return message if found is None else _FLAGS[found[0]] + message[found.end() :]
