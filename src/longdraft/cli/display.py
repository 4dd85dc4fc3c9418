"""The text of a run as it comes."""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Sequence

from rich.cells import cell_len

import longdraft
from longdraft.cli import console
from longdraft.cli.progress import PrefillBar
from longdraft.engine.streaming import Piece

# Blanks, characters of scripts that write no blanks, words.
_WORDS = re.compile(r"\s|[\u1100-\uffdf]|[^\s\u1100-\uffdf]+")
_DRAFTED, _PLAIN = "\x1b[32m", "\x1b[0m"  # green, as figures.DRAFTED says it below


class TextOutput:
    """Writes the text to stdout as it comes, drafted tokens in colour where colour shows.

    Args:
        silent: writes nothing (the text goes into a JSON object instead).
    """

    def __init__(self, silent: bool = False) -> None:
        out = console.stdout()
        self._silent = silent
        self._last = ""
        self._width = out.width if out.is_terminal else 0
        self._column = 0
        self._word = ("", 0)  # what the last line ends with, in its colours, and how wide it is
        self.coloured = console.colours(out) and not silent

    def write(self, pieces: Sequence[Piece]) -> None:
        """Writes and flushes, so that whoever reads sees each step."""
        if self._silent:
            return
        for text, drafted in pieces:
            self._last = text[-1:]
            # Not through rich: it would wrap lines, expand tabs piece by piece and take brackets for markup.
            colours = (_DRAFTED, _PLAIN) if drafted and self.coloured else ("", "")
            for part in _WORDS.findall(_printable(text)) if self._width else [text]:
                sys.stdout.write(self._broken(part, colours) if self._width else part.join(colours))
        sys.stdout.flush()

    def _broken(self, part: str, colours: tuple[str, str]) -> str:
        """A part of a line, with a new line before its word where that would cross the terminal's edge."""
        wide, shown = cell_len(part), part.join(colours)
        if part == "\n" or (part.isspace() and self._column + wide >= self._width):
            self._column, self._word = 0, ("", 0)
            return "\n"
        if part.isspace():
            self._column, self._word = self._column + (8 - self._column % 8 if part == "\t" else wide), ("", 0)
            return shown
        before, width = self._word
        self._column, self._word = self._column + wide, (before + shown, width + wide)
        if self._column <= self._width or width + wide > self._width or self._column == width + wide:
            return shown
        self._column = width + wide
        return (f"\x1b[{width}D\x1b[K" if width else "") + "\n" + before + shown

    def end(self) -> None:
        """Ends the line, if there is one."""
        if self._last not in ("", "\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()


def _printable(text: str) -> str:
    """Without the characters that would steer the terminal: a document must not be able to, through the model."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def shown(run: longdraft.Generation, prompt_tokens: int, output: TextOutput) -> longdraft.Result:
    """Decodes, and shows bar and text as they come."""
    try:
        with PrefillBar(prompt_tokens) as bar:
            for step in run:
                if step.mode == "prefill":
                    bar.update(step.prefilled)
                output.write(step.pieces)
    finally:
        # Also on a second Ctrl-C: the shell's prompt must not follow the text on its line.
        output.end()
    return run.results()[0]
