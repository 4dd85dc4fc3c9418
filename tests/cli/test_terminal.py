"""A conversation in a pseudo-terminal, which Ctrl-C and Ctrl-D reach."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support import elsewhere


class Terminal:
    """Runs a function in a terminal with this many columns."""

    def __init__(self, function: Callable[..., None], *arguments: str, columns: int = 80) -> None:
        self.columns, self.written = columns, ""
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.process = elsewhere.start_at_terminal(os.ttyname(theirs), function, *arguments)
        self._theirs = theirs

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()
        os.close(self._ours)
        os.close(self._theirs)

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
        """Waits until the output satisfies a condition, and returns it."""
        end = time.monotonic() + seconds
        while not done(self.written):
            assert time.monotonic() < end, self.written
            self._read(0.1)
        return self.written

    def ended(self) -> str:
        """The complete output."""
        while self.process.is_alive():
            self._read(0.1)
        while self._read(0.1):
            pass
        return self.written

    def left(self) -> bool:
        """Waits for the end of the program; True if it succeeded."""
        self.ended()
        return self.process.exitcode == 0

    def _read(self, seconds: float) -> bool:
        if not select.select([self._ours], [], [], seconds)[0]:
            return False
        self.written += os.read(self._ours, 1 << 16).decode(errors="replace")
        return True


def prompts(count: int) -> Callable[[str], bool]:
    return lambda written: len(re.findall(r"(?m)> ", written)) >= count


@pytest.fixture
def talk(model_folder: Path) -> Iterator[Terminal]:
    words = "-n", "400", "--plan", "fixed", "--method", "ar", "--model", str(model_folder)
    with Terminal(elsewhere.command, "chat", *words) as terminal:
        terminal.until(prompts(1))
        yield terminal


@pytest.mark.parametrize("leave", ["exit\n", "\x04"])
def test_chat_says_which_model_talks_and_is_left(talk, model_folder, leave):
    assert f"{model_folder.name}, decoded with ar" in " ".join(talk.written.split())
    talk.type(leave)
    assert talk.left()


def test_ctrl_c_stops_an_answer_and_clears_a_line_and_twice_it_ends_the_session(talk):
    talk.type("who?\n")
    talk.until(lambda written: len(written.partition("who?")[2].split()) > 2)
    talk.type("\x03")
    talk.until(lambda written: "stopped" in written and prompts(2)(written))
    talk.type("exi")
    talk.interrupt()
    talk.until(lambda written: "Ctrl-C again" in written and prompts(3)(written))
    talk.type("/set seed 3\n")
    talk.until(lambda written: "seed 3" in written.partition("/set seed 3")[2])
    talk.interrupt()  # the first again, as something was said in between
    talk.until(lambda written: written.count("Ctrl-C again") == 2)
    talk.interrupt()
    assert talk.left()
