"""The output file: one line for each row of the input, in order. A killed process loses at most the last line.

``<name>.run`` records the input and the settings: a run continues a file only if both are the same.
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
_FSYNC_SECONDS = 5.0  # if the machine fails, the rows of this many seconds may be lost


class OutputFile:
    """The file to which rows are appended. The next run continues after the last complete row.

    Args:
        provenance: the input and the settings, as name -> JSON value.
        line_numbers: line numbers of the input's rows, to check the file's rows against; None: no check.

    Attributes:
        errors: number of rows in the file that are errors.
        rows_at_start: number of rows that earlier runs have written.

    Raises:
        ConfigError: the file was begun with another input or other settings, or these were not recorded.
        CheckpointError: the file cannot be read or written, is damaged, or another run is writing it.
    """

    def __init__(self, path: Path, provenance: Mapping[str, Any], line_numbers: Iterable[int] | None = None) -> None:
        self.path, self._record_path, self.errors = path, path.with_name(path.name + ".run"), 0
        self._line_numbers = None if line_numbers is None else iter(line_numbers)
        with file_errors(path, f"{path} cannot be written"):
            self._locked_file = require_regular(path).open("ab")  # holds the lock until it is closed
        try:
            self._lock()
            self._check_provenance({**_FORMAT, **json.loads(json.dumps(provenance))})
            self._file = JsonLines(path, self._check_row, _FSYNC_SECONDS)
        except BaseException:
            self._locked_file.close()
            raise
        self.rows_at_start = self.rows

    @property
    def rows(self) -> int:
        """The number of rows in the file."""
        return self._file.num_lines

    def write(self, row: Mapping[str, Any], failed: bool) -> None:
        """Appends a row, which survives if the process is killed. ``failed``: the row is an error.

        Raises:
            CheckpointError: the disk is full or fails.
        """
        self._file.append(row)
        self.errors += failed

    def close(self) -> None:
        with file_errors(self.path, f"{self.path} cannot be written"), self._locked_file:
            os.fsync(self._locked_file.fileno())

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _lock(self) -> None:
        """Refuses a second run on the same file, if the system has file locks."""
        try:
            import fcntl
        except ImportError:
            return
        try:
            fcntl.flock(self._locked_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"Another run is writing {self.path}: wait for it, or name another file.") from None
        except OSError:  # a file system without locks
            return

    def _check_provenance(self, provenance: dict[str, Any]) -> None:
        """Records the provenance if the file is empty, else compares it with the record."""
        if self.path.stat().st_size == 0:
            with atomic_write(self._record_path) as temporary_path:
                temporary_path.write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")
            return
        advice = f"Name another file, or delete {self.path} and {self._record_path} to begin again."
        try:
            recorded = read_json(self._record_path)
            is_batch_record = {name: recorded[name] for name in _FORMAT} == _FORMAT
        except (OSError, ValueError, KeyError, TypeError):
            is_batch_record = False
        if not is_batch_record:
            raise ConfigError(
                f"{self.path} exists, but {self._record_path.name} does not record its input and settings, so a "
                f"run cannot continue it. {advice}"
            )
        pairs = {name: (recorded.get(name), provenance.get(name)) for name in {**recorded, **provenance}}
        if changed := [f"{name} {old!r}, not {new!r}" for name, (old, new) in pairs.items() if old != new]:
            raise ConfigError(
                f"{self.path} was begun with {'; '.join(changed)}. Run it with the same input and settings. {advice}"
            )

    def _check_row(self, number: int, row: dict[str, Any]) -> None:
        """Checks that an existing row answers the input's row ``number`` (from 1), and counts errors."""
        self.errors += bool(row.get("error"))
        if self._line_numbers:
            line_number, openai_id = next(self._line_numbers, 0), f"batch_req_{number - 1}"
            if row.get("line") != line_number and row.get("id") != openai_id:  # only native rows have "line"
                raise ValueError(f"not the answer to row {number}")
