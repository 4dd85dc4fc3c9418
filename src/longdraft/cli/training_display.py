"""The progress of training runs: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from longdraft.cli.progress import Bar, left

if TYPE_CHECKING:
    from longdraft.training.answers import AnswerFile
    from longdraft.training.loop import Report


class TrainingDisplay(Bar):
    """Shows the preparation and the steps of a run."""

    def __init__(self, silent: bool = False) -> None:
        super().__init__(silent=silent)
        self._started: tuple[float, int] | None = None
        self._agreement = ""

    def prepare(self, what: str, done: int, total: int) -> None:
        """Shows what is being prepared: as a bar of tokens, or as a line if ``total`` is 0."""
        if not total:
            self.say(what)
        else:
            self.draw(what, done, total)
            if self.due():
                self.say(f"{what}: {done:,} of {total:,} tokens")

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


class RowCounter(Bar):
    """Counts the rows of a file that is written.

    Args:
        what: names the work.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self._work = what
        self._began = time.monotonic()

    def update(self, done: int, tokens: int) -> None:
        """Shows the rows in the file, and the speed from the tokens that this run has made."""
        speed = f"{tokens / max(1e-9, time.monotonic() - self._began):,.0f} tokens/s"
        self.draw(self._work, done, figures=speed)
        if self.due():
            self.say(f"{self._work}: {done:,} rows  {speed}")


class AnswersDisplay(Bar):
    """Shows a file of answers while it grows.

    Args:
        total: rows that it has in the end.
    """

    def __init__(self, file: AnswerFile, total: int) -> None:
        super().__init__("answers", total)
        self._file, self._rows, self._first, self._began = file, total, file.rows, time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds of this run so far."""
        return time.monotonic() - self._began

    def update(self) -> None:
        """Shows tokens/s of this run, tokens of the file and the share of each source."""
        file, seconds = self._file, self.seconds
        figures = f"{file.added / max(1e-9, seconds):,.0f} tokens/s, {file.tokens:,} tokens"
        if len(file.shares["source"]) > 1:
            figures += f" ({shares(file.shares['source'])})"
        self.draw("", file.rows, figures=figures)
        if self.due():
            rest = left(seconds, file.rows - self._first, self._rows - self._first)
            self.say(f"{file.rows:,} of {self._rows:,} answers, {figures}, {rest} left")


def shares(counts: Counter[str], most: int = 6) -> str:
    """The shares of the largest, ``most`` at most, in per cent."""
    total, named = max(1, counts.total()), counts.most_common(most)
    rest = counts.total() - sum(count for _, count in named)
    named += [("others", rest)] if rest else []
    return ", ".join(f"{name or 'unnamed'} {100 * count / total:.0f} %" for name, count in named)


def _percent(shares: Sequence[float | None]) -> str:
    """The shares in per cent; a dash for a level that a batch does not have."""
    return " ".join("-" if share is None else f"{100 * share:.0f}" for share in shares) + " %"
