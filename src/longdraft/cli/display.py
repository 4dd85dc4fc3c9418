"""A run as it happens: a bar while the prompt is read, then the text."""

from __future__ import annotations

import sys
import time
import unicodedata
from collections.abc import Sequence

from longdraft.cli import console
from longdraft.cli.progress import Bar
from longdraft.cli.streaming import Piece

_DRAFTED, _PLAIN = "\x1b[32m", "\x1b[0m"  # green, as figures.DRAFTED says it below


class PrefillBar(Bar):
    """A bar while a prompt of so many tokens is read; on what is no terminal, nothing but one line."""

    WHAT = "Reading the prompt"

    def __init__(self, total: int) -> None:
        super().__init__("tokens", total)
        self._tokens, self._began = total, time.monotonic()
        if not self.shown:
            self.say(f"{self.WHAT}, {total:,} tokens ...")
        self.draw(self.WHAT, 0)

    def update(self, read: int) -> None:
        """Shows how many tokens have been read; the last one takes the bar away."""
        speed = read / max(1e-9, time.monotonic() - self._began)
        self.draw(self.WHAT, read, figures=f"{speed:,.0f} tokens/s")
        if read >= self._tokens:
            self.close()


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
