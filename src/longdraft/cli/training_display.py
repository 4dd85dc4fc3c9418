"""A training run as it happens: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from longdraft.cli import console

if TYPE_CHECKING:
    from longdraft.training.run_log import Report

Self = TypeVar("Self", bound="_Shown")

# Seconds between two lines where no terminal is.
EVERY = 15.0


class _Bar:
    """One bar on stderr; nothing where there is no terminal."""

    def __init__(self, silent: bool = False) -> None:
        self.err = console.stderr()
        self.shown = self.err.is_terminal and not silent
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}", markup=False, style="dim"),
            console=self.err,
            transient=True,
            # Drawn when something happened: a thread that draws would take its share of the cores.
            auto_refresh=False,
            disable=not self.shown,
        )
        self._task = self._bar.add_task("", total=None, figures="")
        self._what = ""

    def draw(self, what: str, done: int, total: int | None, figures: str = "") -> None:
        if not self.shown:
            return
        if what != self._what:  # another activity: its speed is not the last one's
            self._bar.reset(self._task, total=total, completed=done, description=what, figures=figures)
            self._what = what
        self._bar.start()
        self._bar.update(self._task, completed=done, total=total, figures=figures, refresh=True)

    def close(self) -> None:
        self._bar.stop()


class _Shown:
    """Inside the ``with``, something is shown."""

    def __init__(self, silent: bool) -> None:
        self._silent = silent
        self._bar = _Bar(silent)
        self._said = float("-inf")

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def _due(self) -> bool:
        """Whether a line is due where there is no terminal."""
        if self._silent or self._bar.shown or time.monotonic() - self._said < EVERY:
            return False
        self._said = time.monotonic()
        return True

    def _say(self, line: str) -> None:
        if not self._silent:
            self._bar.err.print(Text(line, style="dim" if self._bar.shown else ""))


class TrainingDisplay(_Shown):
    """Shows preparation and steps.

    Args:
        silent: shows nothing (another process speaks).
    """

    def __init__(self, silent: bool = False) -> None:
        super().__init__(silent)
        self._started: tuple[float, int] | None = None
        self._agreement = ""

    def prepare(self, what: str, done: int, total: int) -> None:
        """What is being prepared: a line where ``total`` is 0, a bar of tokens else."""
        if not total:
            self._say(what)
        elif self._bar.shown:
            self._bar.draw(what, done, total)
        elif self._due():
            self._say(f"{what}: {done:,} of {total:,} tokens")

    def step(self, report: Report) -> None:
        """A step: figures on the bar; a line for every measurement."""
        now = time.monotonic()
        if self._started is None:
            self._started = (now, report.step)
            self._said = float("-inf")
        if report.agreement:
            levels = range(1, max(report.agreement) + 1)
            self._agreement = f"  agreement {_percent([report.agreement.get(j) for j in levels])}"
        figures = f"loss {report.loss:.3f}{self._agreement}  {report.tokens_per_second:,.0f} tokens/s"
        self._bar.draw("training", report.step, report.steps, figures)
        if report.simulated is not None:
            s = report.simulated
            self._say(
                f"step {report.step:,}: held out: agreement {_percent(s.agreement)}, simulated acceptance "
                f"{s.chain:.2f} (chain) {s.tree:.2f} (tree) tokens a round"
            )
        if self._due() or (report.step == report.steps and not self._bar.shown):
            self._say(f"step {report.step:,}/{report.steps:,}  {figures}{self._left(now, report)}")

    def _left(self, now: float, report: Report) -> str:
        assert self._started is not None
        began, first = self._started
        if report.step == first or report.step == report.steps:
            return ""
        seconds = (now - began) / (report.step - first) * (report.steps - report.step)
        return f"  {timedelta(seconds=round(seconds))} left"


class Counter(_Shown):
    """Counts rows as they are made.

    Args:
        what: is being done. unit: of what is counted. total: None where it is not known.
    """

    def __init__(self, what: str, unit: str, total: int | None = None) -> None:
        super().__init__(silent=False)
        self._what, self._unit, self._total = what, unit, total
        self._began = time.monotonic()

    def update(self, done: int, tokens: int) -> None:
        """So many rows there are, and so many tokens this run has made."""
        speed = f"{tokens / max(1e-9, time.monotonic() - self._began):,.0f} tokens/s"
        self._bar.draw(self._what, done, self._total, speed)
        if self._due():
            of = "" if self._total is None else f" of {self._total:,}"
            self._say(f"{self._what}: {done:,}{of} {self._unit}  {speed}")


def _percent(shares: Sequence[float | None]) -> str:
    """In per cent; a dash for a level that a batch does not have."""
    return " ".join("-" if share is None else f"{100 * share:.0f}" for share in shares) + " %"
