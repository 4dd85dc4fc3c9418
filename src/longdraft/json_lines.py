"""Appends rows to JSON Lines files (results, answers, training data). A later run continues such a file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from longdraft.errors import CheckpointError
from longdraft.files import file_errors, require_regular

_ADVICE = "Delete the file from that line on, or name another file, and run again."


class JsonLines:
    """A JSON Lines file to append rows to. The first row overwrites a last line that a killed process left incomplete.

    Args:
        path: the file, which need not exist.
        on_line: called with the number (from 1) and the value of each existing line; raises an error if the line does
            not belong to this file.
        fsync_seconds: least time between two calls of fsync; 0: :meth:`append` returns once its row is on the disk.

    Attributes:
        num_lines: number of lines in the file.

    Raises:
        CheckpointError: the file cannot be read, or has a line that is damaged or that ``on_line`` rejects.
    """

    def __init__(self, path: Path, on_line: Callable[[int, Any], object], fsync_seconds: float = 0.0) -> None:
        self.path, self.num_lines = path, 0
        self._complete_bytes = 0  # of the complete lines
        self._fsync_seconds, self._last_fsync = fsync_seconds, time.monotonic()
        if not path.exists():
            return
        with file_errors(path, f"{path} cannot be read"), require_regular(path).open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                with file_errors(path, f"{path}:{number} is damaged, or does not belong to this file", _ADVICE):
                    on_line(number, json.loads(line))
                self.num_lines, self._complete_bytes = number, self._complete_bytes + len(line)

    def append(self, row: Mapping[str, Any]) -> None:
        """Appends a row.

        Raises:
            CheckpointError: the row cannot be written, for example because the disk is full. All earlier rows stay.
        """
        line = json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        try:
            with require_regular(self.path).open("ab", buffering=0) as file:
                if file.tell() > self._complete_bytes:
                    file.truncate(self._complete_bytes)
                unwritten = memoryview(line)
                while unwritten:  # a write may be partial
                    unwritten = unwritten[file.write(unwritten) or 0 :]
                if time.monotonic() - self._last_fsync >= self._fsync_seconds:
                    os.fsync(file.fileno())
                    self._last_fsync = time.monotonic()
        except OSError as error:
            with suppress(OSError):
                os.truncate(self.path, self._complete_bytes)
            raise CheckpointError(
                f"{self.path} cannot be written: {error.strerror}. Its {self.num_lines} lines are complete: make room, "
                "and run the same command again to continue."
            ) from error
        self.num_lines, self._complete_bytes = self.num_lines + 1, self._complete_bytes + len(line)
