"""Output on a terminal and to a file."""

from __future__ import annotations

import io
import re
from contextlib import ExitStack, redirect_stderr, redirect_stdout

import pytest

from longdraft.cli.display import TextOutput
from longdraft.cli.main import main
from longdraft.cli.progress import ThroughputBar
from longdraft.engine.streaming import TextDelta
from longdraft.registry import METHODS


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Replaces stdout and stderr by a terminal. Tests call it, because pytest replaces them before a test."""
    redirected = ExitStack()

    def open_terminal() -> Terminal:
        for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("TERM", "xterm-256color")
        stream = Terminal()
        redirected.enter_context(redirect_stdout(stream))
        redirected.enter_context(redirect_stderr(stream))
        return stream

    with redirected:
        yield open_terminal


@pytest.mark.parametrize("unwanted", [None, ("NO_COLOR", "1"), ("TERM", "dumb")])
def test_drafted_tokens_are_coloured_on_a_terminal_where_it_is_wanted(terminal, monkeypatch, unwanted):
    screen = terminal()
    if unwanted:
        monkeypatch.setenv(*unwanted)
    output = TextOutput()
    output.write([TextDelta("one ", False), TextDelta("two", True)])
    output.end()
    assert output.colored == (not unwanted)
    assert screen.getvalue() == ("one two\n" if unwanted else "one \x1b[32mtwo\x1b[0m\n")


def test_text_is_text(terminal, capsys):
    """No markup; a document cannot steer the terminal; a file gets the text alone, and its line ends once."""
    for pieces, silent, shown in (
        ([TextDelta("[b]one ", False), TextDelta("two", True)], False, "[b]one two\n"),
        ([TextDelta("one\n", False)], False, "one\n"), ([TextDelta("one", False)], True, ""),
    ):  # fmt: skip
        output = TextOutput(silent=silent)
        output.write(pieces)
        output.end()
        assert capsys.readouterr() == (shown, "") and not output.colored
    screen = terminal()
    TextOutput().write([TextDelta("[bold]x[/bold] [/] [red :smile:a\x1b[2Jb\x07c\x9bd\te\n", False)])
    assert screen.getvalue() == "[bold]x[/bold] [/] [red :smile:a[2Jbcd\te\n"


def test_the_bar_leaves_nothing_behind(terminal):
    screen = terminal()
    with ThroughputBar("Reading the prompt", "tokens", 1000) as bar:
        bar.update(512, 512)
    shown = screen.getvalue()
    assert " 512/1000" in shown
    assert shown.endswith("\x1b[1A\x1b[2K")  # up, and erase
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is back


def test_no_bar_without_a_terminal(capsys):
    with ThroughputBar("Reading the prompt", "tokens", 1000) as bar:
        bar.draw("Reading the prompt", 512)
        bar.draw("Reading the prompt", 513)
    assert capsys.readouterr() == ("", "Reading the prompt: 512 of 1,000 tokens\n")


@pytest.mark.parametrize("method", ["longspec", "specpv"])
def test_tables_lose_no_names_at_80_columns(terminal, monkeypatch, method):
    screen = terminal()
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["methods", method]) == 0
    shown = re.sub(r"\x1b\[[\d;]*m", "", screen.getvalue())
    for option in METHODS[method].options.values():
        assert re.search(rf"^{option.name}\b", shown, re.M) and all(word in shown for word in option.help.split()[:1])
    assert "…" not in shown and max(map(len, shown.splitlines()[1:])) <= 80
