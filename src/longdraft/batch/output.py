"""The file of answers: one line for each row, in order. If the process is killed, at most the last line is torn.

``<name>.run`` beside it records the input and the settings: a run continues a file only if both are the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from longdraft.errors import CheckpointError, ConfigError
from longdraft.files import atomic_write, file_errors, read_json, require_regular
from longdraft.json_lines import JsonLines

_FORMAT = {"format": "longdraft batch", "version": 1}
# Seconds between two calls of fsync.
_SYNC = 5.0


class OutputFile:
    """The file that rows are appended to; the next run continues after the last whole row.

    Args:
        origin: the input and the settings; name -> JSON value. places: line numbers of the input's rows; None: unknown.

    Attributes:
        errors: how many of its rows are errors. found: how many rows it had at the start.

    Raises:
        ConfigError: the file was begun with another input or other settings, or has no record of them.
        CheckpointError: the file cannot be read or written, is damaged, or another run writes it.
    """

    def __init__(self, path: Path, provenance: Mapping[str, Any], line_numbers: Iterable[int] | None = None) -> None:
        self.path, self._record, self.errors = path, path.with_name(path.name + ".run"), 0
        self._places = None if line_numbers is None else iter(line_numbers)
        with file_errors(path, f"{path} cannot be written"):
            self._held = require_regular(path).open("ab")  # while this is open, no other run writes the file
        try:
            self._lock()
            self._check_origin({**_FORMAT, **json.loads(json.dumps(provenance))})
            self._file = JsonLines(path, self._take, _SYNC)
        except BaseException:
            self._held.close()
            raise
        self.rows_at_start = self.rows

    @property
    def rows(self) -> int:
        """The number of rows in the file."""
        return self._file.num_lines

    def write(self, row: Mapping[str, Any], failed: bool) -> None:
        """Appends a row; it outlives a killed process.

        Raises:
            CheckpointError: the disk is full or fails.
        """
        self._file.append(row)
        self.errors += failed

    def close(self) -> None:
        with file_errors(self.path, f"{self.path} cannot be written"), self._held:
            os.fsync(self._held.fileno())

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _lock(self) -> None:
        """Refuses a second run on the file, where the system has locks."""
        try:
            import fcntl
        except ImportError:
            return
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"Another run is writing {self.path}: wait for it, or name another file.") from None
        except OSError:  # a file system without locks
            return

    def _check_origin(self, origin: dict[str, Any]) -> None:
        """Writes the record of an empty file; compares that of another."""
        if self.path.stat().st_size == 0:
            with atomic_write(self._record) as part:
                part.write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
            return
        advice = f"Name another file, or delete {self.path} and {self._record} to begin again."
        try:
            recorded = read_json(self._record)
            known = {name: recorded[name] for name in _FORMAT} == _FORMAT
        except (OSError, ValueError, KeyError, TypeError):
            known = False
        if not known:
            raise ConfigError(
                f"{self.path} exists, and {self._record.name} beside it does not say what it was made from: a run "
                f"cannot go on with it. {advice}"
            )
        pairs = {name: (recorded.get(name), origin.get(name)) for name in {**recorded, **origin}}
        if other := [f"{name} {old!r}, not {new!r}" for name, (old, new) in pairs.items() if old != new]:
            raise ConfigError(
                f"{self.path} was begun with {'; '.join(other)}. Run it with the same input and settings. {advice}"
            )

    def _take(self, number: int, row: dict[str, Any]) -> None:
        """Counts a row that is there, which says what it answers."""
        self.errors += bool(row.get("error"))
        if self._places and row.get("line") != next(self._places, 0) and row.get("id") != f"batch_req_{number - 1}":
            raise ValueError(f"not the answer to row {number}")
