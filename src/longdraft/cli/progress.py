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
        silent: shows nothing (another process speaks).
    """

    def __init__(self, unit: str = "", total: int | None = None, silent: bool = False) -> None:
        self.err, self.silent = console.stderr(), silent
        self.shown = self.err.is_terminal and not silent
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            *([TextColumn(unit)] if unit else []),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}", markup=False, style="dim"),
            console=self.err,
            transient=True,
            # Drawn when something happened: a thread that draws would take its share of what is measured.
            auto_refresh=False,
            disable=not self.shown,
        )
        self._task = self._bar.add_task("", total=total, figures="")
        self._unit, self._total, self._what = unit, total, ""
        self._activity: tuple[str, float, int] | None = None  # its name, and when it began with how many done
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

    def tell(self, what: str, done: int, total: int | None = None, figures: str = "") -> None:
        """Draws the bar; without a terminal, says it in a line: at once, now and then, and at the end."""
        self.draw(what, done, total, figures)
        total, now = self._total if total is None else total, time.monotonic()
        if self._activity is None or self._activity[0] != what:
            self._activity, self._said = (what, now, done), float("-inf")
        _, began, first = self._activity
        if self.due() or (done == total and not self.shown):
            many = f"{done:,} of {total:,}" if total is not None else f"{done:,}"
            rest = ""
            if total is not None and first < done < total:
                rest = f"about {left(now - began, done - first, total - first)} left"
            told = ", ".join(filter(None, (f"{many} {self._unit}".rstrip(), figures, rest)))
            self.say(f"{what}: {told}" if what else told)

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
    """The remaining time, from the work done and the seconds it took."""
    return timedelta(seconds=round(seconds / done * (total - done)))


class Runs(Bar):
    """Counts runs of contenders, with the time that is left."""

    def __init__(self, total: int) -> None:
        super().__init__("runs", total)
        self._count, self._begun, self._started = total, 0, time.monotonic()

    def told(self, what: str) -> Callable[[str], None]:
        """A function to be called before each run with the contender's name."""

        def tick(name: str) -> None:
            self.draw(f"{what}: {name}", self._begun, anew=False)
            if self.due():
                seconds = time.monotonic() - self._started
                rest = f" about {left(seconds, self._begun, self._count)} left" if self._begun else ""
                self.say(f"Run {self._begun + 1} of {self._count}, {what}: {name} ...{rest}")
            self._begun += 1

        return tick


class PrefillBar(Bar):
    """A bar while a prompt of so many tokens is read."""

    WHAT = "Reading the prompt"

    def __init__(self, total: int) -> None:
        super().__init__("tokens", total)
        self._tokens, self._began = total, time.monotonic()
        self.tell(self.WHAT, 0)

    def update(self, read: int) -> None:
        """Shows how many tokens have been read; the last one takes the bar away."""
        if read >= self._tokens:
            self.close()
        else:
            speed = read / max(1e-9, time.monotonic() - self._began)
            self.tell(self.WHAT, read, figures=f"{speed:,.0f} tokens/s")
