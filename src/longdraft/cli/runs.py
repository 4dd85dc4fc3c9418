"""Counting runs that take long, with the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from longdraft.cli import console


class Runs:
    """Counts runs on stderr, with the time that is left: a bar on a terminal, a line now and then elsewhere."""

    EVERY = 15.0  # seconds between two lines

    def __init__(self, total: int) -> None:
        self._err = console.stderr()
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("runs"),
            TimeRemainingColumn(),
            console=self._err,
            transient=True,
            # Drawn between the runs only: a thread that draws would take its share of what is measured.
            auto_refresh=False,
            disable=not self._err.is_terminal,
        )
        self._task = self._bar.add_task("", total=total)
        self._total, self._begun = total, 0
        self._started = self._said = time.monotonic()

    def told(self, what: str) -> Callable[[str], None]:
        """A function to be called before each run with the contender's name."""

        def tick(name: str) -> None:
            self._bar.update(self._task, completed=self._begun, description=f"{what}: {name}", refresh=True)
            now = time.monotonic()
            if not self._err.is_terminal and (not self._begun or now - self._said > self.EVERY):
                self._said = now
                self._err.print(Text(f"Run {self._begun + 1} of {self._total}, {what}: {name} ...{self._left(now)}"))
            self._begun += 1

        return tick

    def _left(self, now: float) -> str:
        if not self._begun:
            return ""
        seconds = (now - self._started) / self._begun * (self._total - self._begun)
        return f" about {timedelta(seconds=round(seconds))} left"

    def __enter__(self) -> Runs:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
