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


def test_drafted_tokens_are_coloured_on_a_terminal(terminal):
    screen = terminal()
    output = TextOutput()
    output.write([TextDelta("one ", False), TextDelta("two", True)])
    output.end()
    assert output.colored
    assert screen.getvalue() == "one \x1b[32mtwo\x1b[0m\n"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_colour_where_it_is_not_wanted(terminal, monkeypatch, name, value):
    screen = terminal()
    monkeypatch.setenv(name, value)
    output = TextOutput()
    output.write([TextDelta("two", True)])
    assert not output.colored
    assert "\x1b[32m" not in screen.getvalue()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[bold]x[/bold] [/] [red :smile:", None),  # text, and no markup
        ("a\x1b[2Jb\x07c\x9bd\te\n", "a[2Jbcd\te\n"),  # a document cannot steer the terminal
    ],
)
def test_text_on_a_terminal_is_text(terminal, text, shown):
    screen = terminal()
    TextOutput().write([TextDelta(text, False)])
    assert screen.getvalue() == (shown or text)


@pytest.mark.parametrize(
    ("pieces", "silent", "shown"),
    [
        ([TextDelta("[b]one ", False), TextDelta("two", True)], False, "[b]one two\n"),
        ([TextDelta("one\n", False)], False, "one\n"),  # the line ends once
        ([TextDelta("one", False)], True, ""),
    ],
)
def test_a_file_gets_the_text_alone(capsys, pieces, silent, shown):
    output = TextOutput(silent=silent)
    output.write(pieces)
    output.end()
    assert capsys.readouterr() == (shown, "") and not output.colored


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


@pytest.mark.parametrize("method", ["longspec", "self", "specpv"])
def test_tables_lose_no_names_at_80_columns(terminal, monkeypatch, method):
    screen = terminal()
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["methods", method]) == 0
    shown = re.sub(r"\x1b\[[\d;]*m", "", screen.getvalue())
    for option in METHODS[method].options.values():
        assert re.search(rf"^{option.name}\b", shown, re.M) and all(word in shown for word in option.help.split()[:1])
    assert "…" not in shown and max(map(len, shown.splitlines()[1:])) <= 80
