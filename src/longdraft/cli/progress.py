"""Shows progress on stderr: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from longdraft.cli import console

Self = TypeVar("Self", bound="Bar")

# Seconds between two lines where no terminal is.
EVERY = 15.0


class Bar:
    """Inside the ``with``, something is shown. It is gone from a terminal when that ends.

    Args:
        unit: of what is counted. total: None where it is not known.
        timed: say what is left if all goes on as fast as it lately went.
        silent: shows nothing (another process speaks).
    """

    def __init__(self, unit: str = "", total: int | None = None, silent: bool = False, timed: bool = True) -> None:
        self.err, self.silent = console.stderr(), silent
        self.shown = self.err.is_terminal and not silent
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            *([TextColumn(unit)] if unit else []),
            *([TimeRemainingColumn()] if timed else []),
            TextColumn("{task.fields[figures]}", markup=False, style="dim"),
            console=self.err,
            transient=True,
            # Drawn when something happened: a thread that draws would take its share of what is measured.
            auto_refresh=False,
            disable=not self.shown,
        )
        self._task = self._bar.add_task("", total=total, figures="")
        self._total, self._what = total, ""
        self._said = float("-inf")

    def draw(self, what: str, done: int, total: int | None = None, figures: str = "", anew: bool = True) -> None:
        """Draws the bar; does nothing without a terminal.

        Args:
            total: None: as before. anew: another ``what`` is another activity, whose speed is not the last one's.
        """
        if not self.shown:
            return
        total = self._total if total is None else total
        if anew and what != self._what:
            self._bar.reset(self._task, total=total, completed=done, description=what, figures=figures)
        self._what = what
        self._bar.start()
        self._bar.update(self._task, completed=done, total=total, description=what, figures=figures, refresh=True)

    def due(self) -> bool:
        """True if a line is due, without a terminal."""
        if self.silent or self.shown or time.monotonic() - self._said < EVERY:
            return False
        self._said = time.monotonic()
        return True

    def say(self, line: str) -> None:
        """A line above the bar, or in its place."""
        if not self.silent:
            self.err.print(Text(line, style="dim" if self.shown else ""))

    def close(self) -> None:
        """Takes the bar away; more than once does no harm."""
        self._bar.stop()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def left(seconds: float, done: float, total: float) -> timedelta:
    """The remaining time in words, from the work done and the seconds it took."""
    return timedelta(seconds=round(seconds / done * (total - done)))


class Runs(Bar):
    """Counts runs of contenders, with the time that is left."""

    def __init__(self, total: int) -> None:
        super().__init__("runs", total)
        self._count, self._begun, self._started = total, 0, time.monotonic()

    def told(self, what: str, lines: bool = True) -> Callable[[str], None]:
        """A function to be called before each run with the contender's name.

        Args:
            lines: say a line now and then where no terminal is.
        """

        def tick(name: str) -> None:
            self.draw(f"{what}: {name}", self._begun, anew=False)
            if lines and self.due():
                seconds = time.monotonic() - self._started
                rest = f" about {left(seconds, self._begun, self._count)} left" if self._begun else ""
                self.say(f"Run {self._begun + 1} of {self._count}, {what}: {name} ...{rest}")
            self._begun += 1

        return tick
