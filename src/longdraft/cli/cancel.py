"""Ctrl-C: the first asks the engine to stop, the second ends the process. SIGTERM, where it is asked for, only asks."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import typer

from longdraft.cli import console, processes

EXIT_CODE = 130  # 128 + SIGINT, as shells have it


class Cancel:
    """Inside the ``with``, calling it says whether Ctrl-C was pressed.

    Args:
        terminate: take SIGTERM too, as launchers and schedulers send it.
    """

    def __init__(self, sigterm: bool = False) -> None:
        self._signals = (signal.SIGINT, signal.SIGTERM) if sigterm else (signal.SIGINT,)
        self._asked: int | None = None
        self._before: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self._asked is not None

    @property
    def exit_code(self) -> int:
        """Exit code of a process that a signal stopped, by the convention of shells."""
        return EXIT_CODE if self._asked is None else 128 + self._asked

    def __enter__(self) -> Cancel:
        # Python delivers signals to the main thread alone, and lets no other one take them.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in self._signals}
        return self

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._asked is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        # Nothing is printed here: a handler may run in the middle of a write.
        self._asked = number


def interruptible(verb: Callable[..., None]) -> Callable[..., None]:
    """Ctrl-C ends a verb the same way with every version of typer, whose own ways differ."""

    @functools.wraps(verb)
    def wrapped(*arguments: Any, **options: Any) -> None:
        try:
            verb(*arguments, **options)
        except KeyboardInterrupt:
            if processes.is_main_process():
                console.note("Aborted.")
            raise typer.Exit(EXIT_CODE) from None

    return wrapped
