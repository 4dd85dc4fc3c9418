"""A run as it happens: a bar while the prompt is read, then the text."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Sequence
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from longdraft.cli import console
from longdraft.cli.streaming import Piece

_DRAFTED, _PLAIN = "\x1b[32m", "\x1b[0m"  # green, as figures.DRAFTED says it below


class _Rate(ProgressColumn):
    """Tokens a second."""

    def render(self, task: Task) -> Text:
        return Text("" if not task.speed else f"{task.speed:,.0f} tokens/s", style="dim")


class PrefillBar:
    """A bar on stderr that is gone when it is done; on what is no terminal, nothing but one line.

    Args:
        total: prompt tokens.
    """

    def __init__(self, total: int) -> None:
        err = console.stderr()
        self._total = total
        self._bar = Progress(
            TextColumn("Reading the prompt"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tokens"),
            _Rate(),
            console=err,
            transient=True,
            # Drawn between the chunks only: a thread that draws would take its share of what is measured.
            auto_refresh=False,
            disable=not err.is_terminal,
        )
        self._task = self._bar.add_task("", total=total)
        self._open = True
        if err.is_terminal:
            self._bar.start()
        else:
            err.print(Text(f"Reading the prompt, {total:,} tokens ..."))

    def update(self, read: int) -> None:
        """Shows how many tokens have been read; the last one takes the bar away."""
        self._bar.update(self._task, completed=read, refresh=True)
        if read >= self._total:
            self.close()

    def close(self) -> None:
        """Takes the bar away; more than once does no harm."""
        if self._open:
            self._open = False
            self._bar.stop()

    def __enter__(self) -> PrefillBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TextOutput:
    """Writes the text to stdout as it comes, drafted tokens in colour where colour shows.

    Args:
        silent: writes nothing (the text goes into a JSON object instead).
    """

    def __init__(self, silent: bool = False) -> None:
        out = console.stdout()
        self._silent = silent
        self._last = ""
        self._terminal = out.is_terminal
        self.coloured = console.colours(out) and not silent

    def write(self, pieces: Sequence[Piece]) -> None:
        """Writes and flushes, so that whoever reads sees each step."""
        if self._silent:
            return
        for text, drafted in pieces:
            self._last = text[-1:]
            # Not through rich: it would wrap lines, expand tabs piece by piece and take brackets for markup.
            shown = _printable(text) if self._terminal else text
            sys.stdout.write(f"{_DRAFTED}{shown}{_PLAIN}" if drafted and self.coloured else shown)
        sys.stdout.flush()

    def end(self) -> None:
        """Ends the line, if there is one."""
        if self._last not in ("", "\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()


def _printable(text: str) -> str:
    """Without the characters that would steer the terminal: a document must not be able to, through the model."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")
