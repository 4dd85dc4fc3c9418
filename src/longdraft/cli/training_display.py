"""The progress of training runs: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from longdraft.cli.progress import Bar, left

if TYPE_CHECKING:
    from longdraft.training.loop import Report


class TrainingDisplay(Bar):
    """Shows the preparation and the steps of a run."""

    def __init__(self, silent: bool = False) -> None:
        super().__init__(silent=silent)
        self._started: tuple[float, int] | None = None
        self._agreement = ""

    def prepare(self, what: str, done: int, total: int) -> None:
        """Says what is being prepared."""
        self.say(what)

    def step(self, report: Report) -> None:
        """Shows a step's figures on the bar, and a line for every measurement."""
        now = time.monotonic()
        if self._started is None:
            self._started = (now, report.step)
            self._said = float("-inf")
        if report.agreement:
            levels = range(1, max(report.agreement) + 1)
            self._agreement = f"  agreement {_percent([report.agreement.get(j) for j in levels])}"
        figures = f"loss {report.loss:.3f}{self._agreement}  {report.tokens_per_second:,.0f} tokens/s"
        self.draw("training", report.step, report.steps, figures)
        if report.simulated is not None:
            s = report.simulated
            self.say(
                f"step {report.step:,}: held out: agreement {_percent(s.agreement)}, simulated acceptance "
                f"{s.chain:.2f} (chain) {s.tree:.2f} (tree) tokens a round"
            )
        if self.due() or (report.step == report.steps and not self.shown):
            self.say(f"step {report.step:,}/{report.steps:,}  {figures}{self._left(now, report)}")

    def _left(self, now: float, report: Report) -> str:
        assert self._started is not None
        began, first = self._started
        if report.step == first or report.step == report.steps:
            return ""
        return f"  {left(now - began, report.step - first, report.steps - first)} left"


class RowsDisplay(Bar):
    """Counts the rows of a file that is written.

    Args:
        what: names the work. total: rows that the file has in the end; None: unknown. first: rows in it already.
    """

    def __init__(self, what: str, total: int | None = None, first: int = 0) -> None:
        super().__init__(total=total)
        self._work, self._rows, self._first, self._began = what, total, first, time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds of this run so far."""
        return time.monotonic() - self._began

    def update(self, done: int, tokens: int) -> None:
        """Shows the rows in the file, and the speed from the tokens that this run has made."""
        speed, of = f"{tokens / max(1e-9, self.seconds):,.0f} tokens/s", ""
        if self._rows is not None:
            of = f" of {self._rows:,}, {left(self.seconds, done - self._first, self._rows - self._first)} left"
        self.draw(self._work, done, figures=speed)
        if self.due():
            self.say(f"{self._work}: {done:,} rows{of}  {speed}")


def _percent(shares: Sequence[float | None]) -> str:
    """The shares in per cent; a dash for a level that a batch does not have."""
    return " ".join("-" if share is None else f"{100 * share:.0f}" for share in shares) + " %"
