"""Terminal output: results go to stdout, notes and progress to stderr."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder

from rich.console import Console, RenderableType
from rich.text import Text

# Width in columns if the output is not a terminal. By default, rich takes 80 and cuts tables.
NO_TERMINAL_WIDTH = 200

# Consoles are made at each use, because tests and torchrun replace sys.stdout and sys.stderr.


def stdout() -> Console:
    """Returns a console that prints on stdout."""
    return _console(to_stderr=False)


def stderr() -> Console:
    """Returns a console that prints on stderr."""
    return _console(to_stderr=True)


def _console(to_stderr: bool) -> Console:
    end_loading()
    console = Console(stderr=to_stderr, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = NO_TERMINAL_WIDTH
    return console


def has_colors(console: Console) -> bool:
    """True for a terminal with colours, unless NO_COLOR is set."""
    supports_color = console.is_terminal and console.color_system is not None and not console.legacy_windows
    return supports_color and not console.no_color


def print_renderable(out: Console, renderable: RenderableType) -> None:
    """Prints a table or another renderable, without trailing blanks if the output is not a terminal."""
    if out.is_terminal:
        # rich would drop columns of a table that is wider than the terminal. With this width the terminal wraps lines.
        width = max(out.width, out.measure(renderable).minimum)
        out.print(renderable, soft_wrap=False, width=width, crop=False)
        return
    with out.capture() as captured:
        out.print(renderable)
    out.file.write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))
    out.file.flush()


def print_report(
    tables: Iterable[tuple[str, RenderableType]], remarks: Iterable[Text] = (), definitions: Iterable[str] = ()
) -> None:
    """Prints tables under their titles, then remarks, then definitions of the tables' terms, on stdout."""
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
    end_loading()
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def render_bar(fraction: float, width: int = 20) -> Text:
    """Draws a bar of ``width`` columns. ``fraction``: how much of the bar is green."""
    done = round(min(max(fraction, 0.0), 1.0) * width)
    return Text.assemble(("━" * done, "green"), ("━" * (width - done), "dim"))


class Status:
    """Shows messages on stderr: beside a spinner on a terminal, else on a line each."""

    def __init__(self) -> None:
        self._console, self._last_message = stderr(), ""
        self._spinner = self._console.status(Text("")) if self._console.is_terminal else None

    def __call__(self, message: str) -> None:
        if self is not _loading:
            end_loading()
        # Messages of long steps have an attribute: the fraction that is done.
        text, fraction = Text(message + " ..."), getattr(message, "share", None)
        if self._spinner is not None:
            self._spinner.update(text if fraction is None else Text.assemble(render_bar(fraction), " ", text))
            self._spinner.start()
        elif fraction is None or message != self._last_message:  # a line for each message, not for each fraction
            self._console.print(text)
        self._last_message = message

    def close(self) -> None:
        """Ends the spinner. Call it before anything is timed: the spinner's thread wakes up many times a second."""
        if self._spinner is not None:
            self._spinner.stop()


@contextmanager
def status() -> Iterator[Status]:
    """Yields a :class:`Status`, and closes it at the end."""
    shown_status = Status()
    try:
        yield shown_status
    finally:
        shown_status.close()


class _SlowImport(MetaPathFinder):
    """Shows a message when torch is imported: with transformers, that takes seconds."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        global _loading
        if fullname == "torch" and _loading is None:
            _loading = Status()
            _loading("Loading torch and transformers")


_SLOW_IMPORT = _SlowImport()
_loading: Status | None = None  # shows the message of :class:`_SlowImport`


def announce_loading() -> None:
    """From now on, shows a message when torch is imported. The next output ends it."""
    if "torch" not in sys.modules and _SLOW_IMPORT not in sys.meta_path:
        sys.meta_path.insert(0, _SLOW_IMPORT)


def end_loading() -> None:
    """Ends the message of :func:`announce_loading`."""
    global _loading
    if _loading is not None:
        sys.meta_path.remove(_SLOW_IMPORT)  # not in find_spec(): import iterates over this list
        _loading.close()
        _loading = None


@contextmanager
def warnings_once() -> Iterator[None]:
    """Shows each warning of the package once, because the drafter of every run would repeat it."""
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


# Names of Python arguments -> flags. ``top_k`` is --tree-top-k, because typer itself checks the --top-k of sampling.
_FLAGS = {
    name: f"--{name.replace('_', '-')}"
    for name in (
        "arithmetic", "batch", "depth", "device", "draft", "dtype", "kv_dtype", "min_p", "nodes", "offload", "plan",
        "prefill_window", "repetition_penalty", "repetition_window", "rope_factor", "seed", "stop", "temperature",
        "threshold", "top_p", "tree", "weights", "widths",
    )
} | {"max_new_tokens": "--max-tokens", "top_k": "--tree-top-k"}  # fmt: skip
# An error about an argument's value begins with the argument's name, then perhaps the value, then one of these verbs.
_VERB = r"(?=(?: '[^']*')? (?:must|cannot|takes?|is|are|has|says|needs|shapes?)\b)"
_ARGUMENT = re.compile(rf"(?:{'|'.join(_FLAGS)}){_VERB}")


def with_flag_names(message: str) -> str:
    """Replaces the argument's name at the beginning of an error by the argument's flag."""
    match = _ARGUMENT.match(message)
    return message if match is None else _FLAGS[match[0]] + message[match.end() :]
