"""A run as it happens: a bar while the prompt is read, then the text."""

from __future__ import annotations

import sys
import time
import unicodedata
from collections.abc import Sequence
from datetime import timedelta

from longdraft.cli import console
from longdraft.cli.progress import Bar
from longdraft.engine.streaming import Piece

_DRAFTED, _PLAIN = "\x1b[32m", "\x1b[0m"  # green, as figures.DRAFTED says it below


class PrefillBar(Bar):
    """A bar while a prompt of so many tokens is read; on what is no terminal, a line at first and now and then."""

    WHAT = "Reading the prompt"

    def __init__(self, total: int) -> None:
        super().__init__("tokens", total, timed=False)
        self._tokens, self._began = total, time.monotonic()
        self._seen: list[tuple[int, float]] = []  # tokens read, and when
        if self.due():
            self.say(f"{self.WHAT}, {total:,} tokens ...")
        self.draw(self.WHAT, 0)

    def update(self, read: int) -> None:
        """Shows how many tokens have been read; the last one takes the bar away."""
        self._seen.append((read, time.monotonic()))
        left = self._left()
        rest = "" if left is None else f", about {timedelta(seconds=round(left))} left"
        speed = read / max(1e-9, time.monotonic() - self._began)
        self.draw(self.WHAT, read, figures=f"{speed:,.0f} tokens/s{rest}")
        if read >= self._tokens:
            self.close()
        elif self.due():
            self.say(f"{self.WHAT}, {read:,} of {self._tokens:,} tokens{rest}")

    def _left(self) -> float | None:
        """Seconds: a token takes longer the more stand before it, by a constant for each of them."""
        if len(self._seen) < 4:  # the first piece may have been there already, and warms up
            return None
        (n1, t1), (n2, t2) = self._seen[1:3]
        (n3, t3), (n4, t4) = self._seen[-2:]
        if n1 == n2 or n3 == n4:
            return None
        first, now = (t2 - t1) / (n2 - n1), (t4 - t3) / (n4 - n3)
        slower = max(0.0, now - first) / max(1, n4 - n2)
        left = self._tokens - n4
        return left * (now + slower * left / 2)


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
