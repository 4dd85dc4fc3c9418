"""Ctrl-C: the first asks the engine to stop, the second ends the process."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

EXIT_CODE = 130  # 128 + SIGINT, as shells have it


class Cancel:
    """Inside the ``with``, calling it says whether Ctrl-C was pressed."""

    def __init__(self) -> None:
        self._asked = False
        self._before: Any = None

    def __call__(self) -> bool:
        return self._asked

    def __enter__(self) -> Cancel:
        # Python delivers signals to the main thread alone, and lets no other one take them.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        # Nothing is printed here: a handler may run in the middle of a write.
        self._asked = True
