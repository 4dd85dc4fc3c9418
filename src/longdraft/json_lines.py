"""JSON Lines files that a run appends to and a later run continues, such as results, answers and training data."""

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


class JsonLines:
    """A JSON Lines file to append rows to. A line that a killed process left incomplete is overwritten.

    Nothing is written before the first row.

    Args:
        on_line: called with the number (from 1) and the value of each existing line. It raises for a line that does not
            belong to this file.
        fsync_seconds: time between two calls of fsync; 0: a row is on the disk once :meth:`append` returns.

    Attributes:
        num_lines: number of lines in the file.

    Raises:
        CheckpointError: the file cannot be read, or has a line that is damaged or does not belong to it. Errors of
            longdraft that ``on_line`` raises pass through.
    """

    def __init__(self, path: Path, on_line: Callable[[int, Any], object], fsync_seconds: float = 0.0) -> None:
        self.path, self.num_lines = path, 0
        self._end, self._seconds, self._synced = 0, fsync_seconds, time.monotonic()
        if not path.exists():
            return
        with file_errors(path, f"{path} cannot be read"), require_regular(path).open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                with file_errors(path, f"{path}:{number} is damaged, or none of this file's", _ADVICE):
                    on_line(number, json.loads(line))
                self.num_lines, self._end = number, self._end + len(line)

    def append(self, row: Mapping[str, Any]) -> None:
        """Appends a row.

        Raises:
            CheckpointError: it cannot be written, for example on a full disk. The rows before it stay.
        """
        line = json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        try:
            with require_regular(self.path).open("ab", buffering=0) as file:
                if file.tell() > self._end:
                    file.truncate(self._end)
                rest = memoryview(line)
                while rest:
                    rest = rest[file.write(rest) or 0 :]
                if time.monotonic() - self._synced >= self._seconds:
                    os.fsync(file.fileno())
                    self._synced = time.monotonic()
        except OSError as error:
            with suppress(OSError):
                os.truncate(self.path, self._end)
            raise CheckpointError(
                f"{self.path} cannot be written: {error.strerror}. Its {self.num_lines} lines are complete: make room, "
                "and run the same command again to go on."
            ) from error
        self.num_lines, self._end = self.num_lines + 1, self._end + len(line)


_ADVICE = "Cut the file off before that line, or name another, and run again."
