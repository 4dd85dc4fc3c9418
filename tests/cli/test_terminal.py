"""The command line in a terminal: a pseudo-terminal of few columns, read as a terminal shows it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence

import psutil
import pytest

from longdraft import methods


def _in_the_foreground() -> None:
    """So that Ctrl-C reaches a program, also where the tests are a shell's background job, which ignores it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A program in a terminal of so many columns."""

    def __init__(self, *arguments: object, columns: int = 80, program: Sequence[str] = ("-m", "longdraft")) -> None:
        self.columns, self.written = columns, ""
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, *program, *map(str, arguments)], stdin=theirs, stdout=theirs, stderr=theirs,
            start_new_session=True, env=environment | {"TERM": "xterm"},
            preexec_fn=_in_the_foreground,
        )  # fmt: skip
        os.close(theirs)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def interrupt(self) -> None:
        """Ctrl-C, once the program waits for a key: Python misses a signal between a prompt and its first wait."""
        program, seen = psutil.Process(self.process.pid), [("", -1)]

        def waits(_: str) -> bool:
            seen.append((program.status(), program.num_ctx_switches().voluntary))
            return seen[-1] == seen[-2] and seen[-1][0] == psutil.STATUS_SLEEPING

        self.until(waits)
        self.type("\x03")

    def until(self, done: Callable[[str], bool], seconds: float = 60) -> str:
        """What the screen shows once that is so."""
        end = time.monotonic() + seconds
        while not done(self.written):
            assert time.monotonic() < end, self.written
            self._read(0.1)
        return self.screen()

    def ended(self) -> str:
        """What the screen shows in the end."""
        while self.process.poll() is None:
            self._read(0.1)
        while self._read(0.1):
            pass
        return self.screen()

    def _read(self, seconds: float) -> bool:
        if not select.select([self._ours], [], [], seconds)[0]:
            return False
        try:
            self.written += os.read(self._ours, 1 << 16).decode(errors="replace")
        except OSError:  # the other end is closed
            time.sleep(0.05)
            return False
        return True

    def screen(self) -> str:
        """What was written, as a terminal shows it: lines wrap at the edge, and the cursor moves."""
        lines, line, at = [], [], 0
        for move, count, kind, char in re.findall(r"(\x1b\[\??([\d;]*)([A-Za-z]))|(.)", self.written, re.S):
            if move:
                at = max(0, min(at, self.columns - 1) - int(count or 1)) if kind == "D" else at
                line = line[:at] if kind == "K" and count in ("", "0") else [] if kind == "K" else line
            elif char == "\n" or (char >= " " and at == self.columns):
                lines.append(line)
                line, at = [], 0 if char >= " " else at
            if char == "\r":
                at = 0
            elif char == "\t":
                at = min(at + 8 - at % 8, self.columns - 1)
            elif char >= " ":
                line = [*line, *" " * (at - len(line))]
                line[at : at + 1] = [char]
                at += 1
        return "\n".join("".join(each).rstrip() for each in [*lines, line])


@pytest.fixture
def talk(model_folder):
    arguments = ["chat", "--model", model_folder, "-n", 12, "--plan", "fixed", "--method", "prompt-lookup"]
    with Terminal(*arguments) as terminal:
        terminal.until(lambda written: "> " in written)
        yield terminal


def prompts(count: int) -> Callable[[str], bool]:
    return lambda written: len(re.findall(r"(?m)> ", written)) >= count


def test_chat_says_which_model_talks(talk, model_folder):
    assert f"{model_folder.name}, decoded with prompt-lookup" in " ".join(talk.screen().split())


@pytest.mark.parametrize("leave", ["exit\n", "quit\n", "/exit\n", "\x04"])
def test_chat_is_left(talk, leave):
    talk.type(leave)
    talk.ended()
    assert talk.process.returncode == 0


def test_chat_is_left_by_ctrl_c_twice(talk):
    talk.interrupt()
    talk.until(lambda written: "once more" in written and prompts(2)(written))
    talk.interrupt()
    talk.ended()
    assert talk.process.returncode == 0


def test_ctrl_c_clears_the_line_and_the_session_goes_on(talk):
    talk.type("exi")
    talk.interrupt()
    talk.until(lambda written: "once more" in written and prompts(2)(written))
    talk.type("/seed 3\n")
    talk.until(lambda written: "seed 3" in written.partition("/seed 3")[2])
    talk.interrupt()  # the first again, as something was said in between
    talk.until(lambda written: written.count("once more") == 2)
    talk.type("exit\n")
    talk.ended()
    assert talk.process.returncode == 0


WRITES = """
import sys
from longdraft.cli.display import TextOutput
output, text = TextOutput(), sys.argv[1]
for at in range(0, len(text), 3):
    output.write([(text[at : at + 2], True), (text[at + 2 : at + 3], False)])
output.end()
"""
TEXT = (
    "The sea and the ship, a harbour; lighthouse-keepers write letters.\n\n  Indented\twords, supercalifragilistic ends"
)


@pytest.mark.parametrize("columns", [21, 22, 33, 200])
def test_lines_break_between_words(columns):
    with Terminal(TEXT, columns=columns, program=("-c", WRITES)) as terminal:
        shown = terminal.ended()
    assert shown.split() == TEXT.split()
    assert "\n\n  Indented" in shown and max(map(len, shown.splitlines())) <= columns
    assert (len(shown.splitlines()) >= 5) == (columns < 200)


def test_a_word_that_is_wider_than_the_terminal_and_scripts_without_blanks_are_whole():
    for text in ("see " + "x" * 50 + " end", "\u65e5\u672c\u8a9e" * 12):
        with Terminal(text, columns=20, program=("-c", WRITES)) as terminal:
            assert "".join(terminal.ended().split()) == text.replace(" ", "")


def test_tables_lose_no_names_at_80_columns():
    for method in [m["name"] for m in methods() if m["name"] in ("longspec", "self", "eagle3", "specpv")]:
        with Terminal("methods", method) as terminal:
            shown = terminal.ended()
        from longdraft.methods import METHODS

        for option in METHODS[method].options.values():
            assert re.search(rf"^{option.name}\b", shown, re.M), option.name
            assert option.help.split()[0] in shown if option.help else True
        assert "…" not in shown
