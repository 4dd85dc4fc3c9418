"""The progress of training runs: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from longdraft.cli.progress import Bar

if TYPE_CHECKING:
    from longdraft.training.loop import Report


class TrainingDisplay(Bar):
    """Shows the steps of a run."""

    _agreement = ""

    def step(self, report: Report) -> None:
        """Shows a step's figures on the bar, and a line for every measurement."""
        if report.agreement:
            levels = range(1, max(report.agreement) + 1)
            self._agreement = f", agreement {_percent([report.agreement.get(j) for j in levels])}"
        if report.simulated is not None:
            s = report.simulated
            self.say(
                f"step {report.step:,}: held out: agreement {_percent(s.agreement)}, simulated acceptance "
                f"{s.chain:.2f} (chain) {s.tree:.2f} (tree) tokens a round"
            )
        figures = f"loss {report.loss:.3f}{self._agreement}, {report.tokens_per_second:,.0f} tokens/s"
        self.tell("training", report.step, report.steps, figures)


class RowsDisplay(Bar):
    """Counts the rows of a file that is written.

    Args:
        what: names the work. total: rows that the file has in the end; None: unknown.
    """

    def __init__(self, what: str, total: int | None = None) -> None:
        super().__init__("rows", total)
        self._work, self._began = what, time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds of this run so far."""
        return time.monotonic() - self._began

    def update(self, done: int, tokens: int) -> None:
        """Shows the rows in the file, and the speed from the tokens that this run has made."""
        self.tell(self._work, done, figures=f"{tokens / max(1e-9, self.seconds):,.0f} tokens/s")


def _percent(shares: Sequence[float | None]) -> str:
    """The shares in per cent; a dash for a level that a batch does not have."""
    return " ".join("-" if share is None else f"{100 * share:.0f}" for share in shares) + " %"
