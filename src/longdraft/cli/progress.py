"""Progress on stderr: a bar on a terminal, otherwise a line every 15 seconds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from longdraft.cli import console

if TYPE_CHECKING:
    from longdraft.bench.experiment import Tick
    from longdraft.training.loop import StepReport

Self = TypeVar("Self", bound="ProgressBar")

# Seconds between two lines if stderr is not a terminal.
LINE_INTERVAL = 15.0


class ProgressBar:
    """A progress bar, which disappears at the end of its ``with`` block.

    Args:
        unit: what is counted, in the plural.
        total: the count at the end; None: unknown.
    """

    def __init__(self, unit: str = "", total: int | None = None, silent: bool = False) -> None:
        self._err, self._silent = console.stderr(), silent
        self._is_bar = self._err.is_terminal and not silent
        self._bar = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), MofNCompleteColumn(),
            *([TextColumn(unit)] if unit else []), TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}", markup=False, style="dim"),
            console=self._err, transient=True, disable=not self._is_bar,
            auto_refresh=False,  # draws on updates only: a drawing thread would slow down measurements
        )  # fmt: skip
        self._task = self._bar.add_task("", total=total, figures="")
        self._unit, self._total, self._began = unit, total, time.monotonic()
        self._activity: tuple[str, float, int] | None = None  # (name, start time, count at the start)
        self._last_line = 0.0

    def draw(self, activity: str, done: int, total: int | None = None, figures: str = "") -> None:
        """Draws the bar. Without a terminal, prints a line at the start, every 15 seconds, and at the end.

        Args:
            activity: what is being done; a new activity restarts the estimate of the time left.
            done: the count so far.
            total: the count at the end; None: the constructor's.
            figures: further text, such as tokens/s.
        """
        total, now = self._total if total is None else total, time.monotonic()
        is_new = self._activity is None or self._activity[0] != activity
        if self._activity is None or is_new:  # the first condition is for mypy
            self._activity = activity, now, done
            self._bar.reset(self._task, total=total, completed=done, description=activity, figures=figures)
        if self._is_bar:
            self._bar.start()
            self._bar.update(self._task, completed=done, total=total, figures=figures, refresh=True)
        elif is_new or now - self._last_line >= LINE_INTERVAL or done == total:
            self._last_line = now
            _, start_time, start_count = self._activity
            count = f"{done:,} of {total:,}" if total is not None else f"{done:,}"
            time_left = ""
            if total is not None and start_count < done < total:
                left = (now - start_time) / (done - start_count) * (total - done)
                time_left = f"about {timedelta(seconds=round(left))} left"
            text = ", ".join(filter(None, (f"{count} {self._unit}".rstrip(), figures, time_left)))
            self.print_line(f"{activity}: {text}" if activity else text)

    def print_line(self, line: str) -> None:
        """Prints a line above the bar."""
        if not self._silent:
            self._err.print(Text(line, style="dim" if self._is_bar else ""))

    def close(self) -> None:
        """Removes the bar. Further calls have no effect."""
        self._bar.stop()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ThroughputBar(ProgressBar):
    """A progress bar of one activity, which shows tokens/s."""

    def __init__(self, activity: str, unit: str, total: int | None = None) -> None:
        super().__init__(unit, total)
        self._activity_name = activity

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def update(self, done: int, tokens: int, suffix: str = "") -> None:
        """Draws the bar. ``tokens``: tokens since the start, for tokens/s; ``suffix``: text behind tokens/s."""
        self.draw(self._activity_name, done, figures=f"{tokens / max(1e-9, self.seconds):,.0f} tokens/s{suffix}")


class RunsBar(ProgressBar):
    """A progress bar of a benchmark's runs."""

    def __init__(self, total: int) -> None:
        super().__init__("runs", total)
        self._num_started = 0

    def ticker(self, label: str) -> Tick:
        """Returns a function that draws the bar. It is called with a method's name before a run of the method, and with
        the number of prompt tokens while the run reads them."""

        def tick(name: str, prefilled: int = 0, /) -> None:
            if prefilled:
                self.draw("", self._num_started - 1, figures=f"{label}: {name}, {prefilled:,} prompt tokens read")
                return
            self.draw("", self._num_started, figures=f"{label}: {name}")
            self._num_started += 1

        return tick


class TrainingBar(ProgressBar):
    """A progress bar of a training run's steps."""

    _agreement = ""  # text of the last agreement; most steps do not report one

    def show_step(self, report: StepReport) -> None:
        """Shows a step's metrics on the bar, and prints a line for a measurement."""
        if report.agreement:
            levels = range(1, max(report.agreement) + 1)
            self._agreement = f", agreement {_percent([report.agreement.get(j) for j in levels])}"
        if report.simulated is not None:
            simulated = report.simulated
            self.print_line(
                f"step {report.step:,}: held out: agreement {_percent(simulated.agreement)}, simulated acceptance "
                f"{simulated.chain:.2f} (chain) {simulated.tree:.2f} (tree) tokens a round"
            )
        figures = f"loss {report.loss:.3f}{self._agreement}, {report.tokens_per_second:,.0f} tokens/s"
        self.draw("training", report.step, report.steps, figures)


def _percent(shares: Sequence[float | None]) -> str:
    """Formats shares as percentages, with a dash for None."""
    return " ".join("-" if share is None else f"{100 * share:.0f}" for share in shares) + " %"
