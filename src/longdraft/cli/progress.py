"""Shows progress on stderr: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from longdraft.cli import console

if TYPE_CHECKING:
    from longdraft.training.loop import StepReport

Self = TypeVar("Self", bound="ProgressBar")

# Seconds between two lines where no terminal is.
LINE_INTERVAL = 15.0


class ProgressBar:
    """Inside the ``with``, something is shown. It is gone from a terminal when that ends.

    Args:
        unit: of what is counted. total: None where it is not known.
        silent: shows nothing (another process speaks).
    """

    def __init__(self, unit: str = "", total: int | None = None, silent: bool = False) -> None:
        self._err, self._silent = console.stderr(), silent
        self._shown = self._err.is_terminal and not silent
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            *([TextColumn(unit)] if unit else []),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}", markup=False, style="dim"),
            console=self._err,
            transient=True,
            # Drawn when something happened: a thread that draws would take its share of what is measured.
            auto_refresh=False,
            disable=not self._shown,
        )
        self._task = self._bar.add_task("", total=total, figures="")
        self._unit, self._total, self._began = unit, total, time.monotonic()
        self._activity: tuple[str, float, int] | None = None  # its name, and when it began with how many done
        self._said = 0.0

    def draw(self, what: str, done: int, total: int | None = None, figures: str = "") -> None:
        """Draws the bar; without a terminal, says it in a line: at once, now and then, and at the end.

        Args:
            what: another one is another activity, whose speed is not the last one's. total: None: as before.
        """
        total, now = self._total if total is None else total, time.monotonic()
        anew = self._activity is None or self._activity[0] != what
        if self._activity is None or anew:
            self._activity = what, now, done
            self._bar.reset(self._task, total=total, completed=done, description=what, figures=figures)
        if self._shown:
            self._bar.start()
            self._bar.update(self._task, completed=done, total=total, figures=figures, refresh=True)
        elif anew or now - self._said >= LINE_INTERVAL or done == total:
            self._said = now
            _, began, first = self._activity
            many = f"{done:,} of {total:,}" if total is not None else f"{done:,}"
            rest = ""
            if total is not None and first < done < total:
                left = (now - began) / (done - first) * (total - done)
                rest = f"about {timedelta(seconds=round(left))} left"
            told = ", ".join(filter(None, (f"{many} {self._unit}".rstrip(), figures, rest)))
            self.print_line(f"{what}: {told}" if what else told)

    def print_line(self, line: str) -> None:
        """A line above the bar, or in its place."""
        if not self._silent:
            self._err.print(Text(line, style="dim" if self._shown else ""))

    def close(self) -> None:
        """Takes the bar away; more than once does no harm."""
        self._bar.stop()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ThroughputBar(ProgressBar):
    """Counts work whose speed is in tokens.

    Args:
        what: names the work. total: None where it is not known.
    """

    def __init__(self, what: str, unit: str, total: int | None = None) -> None:
        super().__init__(unit, total)
        self._what = what

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._began

    def update(self, done: int, tokens: int, more: str = "") -> None:
        """Shows what is done, and the speed of the tokens that this run has made."""
        self.draw(self._what, done, figures=f"{tokens / max(1e-9, self.seconds):,.0f} tokens/s{more}")


class RunsBar(ProgressBar):
    """Counts runs of contenders, with the time that is left."""

    def __init__(self, total: int) -> None:
        super().__init__("runs", total)
        self._begun = 0

    def ticker(self, what: str) -> Callable[[str], None]:
        """A function to be called before each run with the contender's name."""

        def tick(name: str) -> None:
            self.draw("", self._begun, figures=f"{what}: {name}")
            self._begun += 1

        return tick


class TrainingBar(ProgressBar):
    """Shows the steps of a training run."""

    _agreement = ""

    def show_step(self, report: StepReport) -> None:
        """Shows a step's figures on the bar, and a line for every measurement."""
        if report.agreement:
            levels = range(1, max(report.agreement) + 1)
            self._agreement = f", agreement {_percent([report.agreement.get(j) for j in levels])}"
        if report.simulated is not None:
            s = report.simulated
            self.print_line(
                f"step {report.step:,}: held out: agreement {_percent(s.agreement)}, simulated acceptance "
                f"{s.chain:.2f} (chain) {s.tree:.2f} (tree) tokens a round"
            )
        figures = f"loss {report.loss:.3f}{self._agreement}, {report.tokens_per_second:,.0f} tokens/s"
        self.draw("training", report.step, report.steps, figures)


def _percent(shares: Sequence[float | None]) -> str:
    """The shares in per cent; a dash for a level that a batch does not have."""
    return " ".join("-" if share is None else f"{100 * share:.0f}" for share in shares) + " %"
