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

CTRL_C_EXIT_CODE = 130  # 128 + SIGINT, as in shells


class Cancel:
    """A context manager that catches Ctrl-C. Called as a function, it returns True once Ctrl-C was pressed.

    Args:
        sigterm: catch SIGTERM too, which launchers and schedulers send.
    """

    def __init__(self, sigterm: bool = False) -> None:
        self._signals = (signal.SIGINT, signal.SIGTERM) if sigterm else (signal.SIGINT,)
        self._signal_number: int | None = None
        self._previous_handlers: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self._signal_number is not None

    @property
    def exit_code(self) -> int:
        """128 + the number of the signal that was received, as in shells; 130 if there was none."""
        return CTRL_C_EXIT_CODE if self._signal_number is None else 128 + self._signal_number

    def __enter__(self) -> Cancel:
        # In Python, only the main thread may set signal handlers.
        if threading.current_thread() is threading.main_thread():
            self._previous_handlers = {number: signal.signal(number, self._handle) for number in self._signals}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signal_number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        # No printing here: a handler may run in the middle of a write.
        self._signal_number = number


def interruptible(command: Callable[..., None]) -> Callable[..., None]:
    """Makes Ctrl-C end a command with exit code 130. Versions of typer differ in the code."""

    @functools.wraps(command)
    def wrapped(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except KeyboardInterrupt:
            if processes.is_main_process():
                console.note("Aborted.")
            raise typer.Exit(CTRL_C_EXIT_CODE) from None

    return wrapped
