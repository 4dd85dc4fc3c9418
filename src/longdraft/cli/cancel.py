"""Cancels a run on Ctrl-C: the first asks the run to stop, the second raises KeyboardInterrupt. SIGTERM only asks."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import typer

from longdraft.cli import console, processes

EXIT_CODE = 130  # 128 + SIGINT, as in shells


class Cancel:
    """A context manager that catches Ctrl-C. Calling it returns True once Ctrl-C was pressed.

    Args:
        sigterm: catch SIGTERM too, which launchers and schedulers send.
    """

    def __init__(self, sigterm: bool = False) -> None:
        self._signals = (signal.SIGINT, signal.SIGTERM) if sigterm else (signal.SIGINT,)
        self._received: int | None = None
        self._previous: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self._received is not None

    @property
    def exit_code(self) -> int:
        """128 + the number of the signal, as in shells."""
        return EXIT_CODE if self._received is None else 128 + self._received

    def __enter__(self) -> Cancel:
        # In Python, only the main thread may set signal handlers.
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in self._signals}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        # No printing here: a handler may run in the middle of a write.
        self._received = number


def interruptible(verb: Callable[..., None]) -> Callable[..., None]:
    """Makes Ctrl-C end a command with exit code 130, whatever the version of typer."""

    @functools.wraps(verb)
    def wrapped(*arguments: Any, **options: Any) -> None:
        try:
            verb(*arguments, **options)
        except KeyboardInterrupt:
            if processes.is_main_process():
                console.note("Aborted.")
            raise typer.Exit(EXIT_CODE) from None

    return wrapped
