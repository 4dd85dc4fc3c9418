"""The text of a run as it comes."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Sequence

import longdraft
from longdraft.cli import console
from longdraft.cli.progress import ThroughputBar
from longdraft.engine.streaming import TextDelta

_DRAFTED, _PLAIN = "\x1b[32m", "\x1b[0m"  # green, as figures.DRAFTED says it below


class TextOutput:
    """Writes the text to stdout as it comes, drafted tokens in colour where colour shows.

    Args:
        silent: writes nothing (the text goes into a JSON object instead).
    """

    def __init__(self, silent: bool = False) -> None:
        out = console.stdout()
        self._silent = silent
        self._last, self._terminal = "", out.is_terminal
        self.colored = console.has_colors(out) and not silent

    def write(self, deltas: Sequence[TextDelta]) -> None:
        """Writes and flushes, so that whoever reads sees each step."""
        if self._silent:
            return
        for text, drafted in deltas:
            self._last = text[-1:]
            # Not through rich: it would wrap lines, expand tabs piece by piece and take brackets for markup.
            colours = (_DRAFTED, _PLAIN) if drafted and self.colored else ("", "")
            sys.stdout.write((_printable(text) if self._terminal else text).join(colours))
        sys.stdout.flush()

    def end(self) -> None:
        """Ends the line, if there is one."""
        if self._last not in ("", "\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()


def _printable(text: str) -> str:
    """Without the characters that would steer the terminal: a document must not be able to, through the model."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def display_run(run: longdraft.Generation, prompt_tokens: int, output: TextOutput) -> longdraft.Result:
    """Decodes, and shows bar and text as they come."""
    try:
        with ThroughputBar("Reading the prompt", "tokens", prompt_tokens) as bar:
            bar.update(0, 0)
            for step in run:
                if step.mode == "prefill" and step.prefilled < prompt_tokens:
                    bar.update(step.prefilled, step.prefilled)
                elif step.mode == "prefill":
                    bar.close()
                output.write(step.pieces)
    finally:
        # Also on a second Ctrl-C: the shell's prompt must not follow the text on its line.
        output.end()
    return run.results()[0]
