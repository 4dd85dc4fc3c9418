"""Shows the text of a run while it is generated."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Sequence

import longdraft
from longdraft.cli import console
from longdraft.cli.progress import ThroughputBar
from longdraft.engine.streaming import TextDelta

_GREEN, _RESET = "\x1b[32m", "\x1b[0m"  # the colour of figures.DRAFTED_STYLE


class TextOutput:
    """Writes text to stdout as it comes, with drafted tokens in colour on a terminal.

    Args:
        silent: True: writes nothing, because --json prints the text.
    """

    def __init__(self, silent: bool = False) -> None:
        out = console.stdout()
        self._silent = silent
        self._last_char, self._is_terminal = "", out.is_terminal
        self.colored = console.has_colors(out) and not silent

    def write(self, deltas: Sequence[TextDelta]) -> None:
        """Writes new text, and flushes."""
        if self._silent:
            return
        for text, drafted in deltas:
            self._last_char = text[-1:]
            # Not printed with rich, because rich wraps lines, expands tabs, and reads brackets as markup.
            before, after = (_GREEN, _RESET) if drafted and self.colored else ("", "")
            sys.stdout.write(before + (_printable(text) if self._is_terminal else text) + after)
        sys.stdout.flush()

    def end(self) -> None:
        """Ends the last line, unless it is empty."""
        if self._last_char not in ("", "\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()


def _printable(text: str) -> str:
    """Removes control characters: text that the model copies from a document must not control the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def display_run(run: longdraft.Generation, prompt_tokens: int, output: TextOutput) -> longdraft.Result:
    """Decodes a run of ``prompt_tokens`` prompt tokens. Shows a progress bar of the prefill, then writes the text."""
    try:
        with ThroughputBar("Reading the prompt", "tokens", prompt_tokens) as bar:
            bar.update(0, 0)
            for step in run:
                if step.mode == "prefill" and step.prefilled < prompt_tokens:
                    bar.update(step.prefilled, tokens=step.prefilled)
                elif step.mode == "prefill":
                    bar.close()
                output.write(step.pieces)
    finally:
        # Also after KeyboardInterrupt, so that the shell's prompt begins on a new line.
        output.end()
    return run.results()[0]
