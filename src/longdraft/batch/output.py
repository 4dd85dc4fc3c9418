"""Writes the output file of a batch: one line for each row of the input, in order.

If the process is killed, at most the last line is lost. ``<name>.run`` records the input and the settings. A later run
continues a file only if it has the same input and settings as the record.
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
_FSYNC_SECONDS = 5.0  # between two fsyncs: if the machine fails, the rows of these seconds may be lost


class OutputFile:
    """Appends rows to a file. If the file exists, continues after its last complete row.

    Args:
        provenance: the input and the settings, as name -> JSON value.
        line_numbers: line number of each row of the input. Existing rows must match these numbers; None: no check.

    Attributes:
        num_errors: number of rows in the file that hold an error instead of an answer.
        num_rows_at_start: number of rows that earlier runs have written.

    Raises:
        ConfigError: the recorded input or settings differ from ``provenance``, or there is no record.
        CheckpointError: the file cannot be read or written, is damaged, or another run is writing it.
    """

    def __init__(self, path: Path, provenance: Mapping[str, Any], line_numbers: Iterable[int] | None = None) -> None:
        self.path, self._record_path, self.num_errors = path, path.with_name(path.name + ".run"), 0
        self._line_numbers = None if line_numbers is None else iter(line_numbers)
        with file_errors(path, f"{path} cannot be written"):
            self._lock_file = require_regular(path).open("ab")  # holds the lock until it is closed
        try:
            self._lock()
            # JSON and back: tuples become lists, as in the record that is read from the disk.
            self._check_provenance({**_FORMAT, **json.loads(json.dumps(provenance))})
            self._json_lines = JsonLines(path, self._check_row, _FSYNC_SECONDS)
        except BaseException:
            self._lock_file.close()
            raise
        self.num_rows_at_start = self.num_rows

    @property
    def num_rows(self) -> int:
        """The number of rows in the file."""
        return self._json_lines.num_lines

    def write(self, row: Mapping[str, Any], failed: bool) -> None:
        """Appends a row. Killing the process afterwards does not lose the row. ``failed``: the row holds an error.

        Raises:
            CheckpointError: the disk is full or fails.
        """
        self._json_lines.append(row)
        self.num_errors += failed

    def close(self) -> None:
        with file_errors(self.path, f"{self.path} cannot be written"), self._lock_file:
            os.fsync(self._lock_file.fileno())

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
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
        recorded_and_current = {name: (recorded.get(name), provenance.get(name)) for name in {**recorded, **provenance}}
        if changed := [
            f"{name} {old!r}, not {new!r}" for name, (old, new) in recorded_and_current.items() if old != new
        ]:
            raise ConfigError(
                f"{self.path} was begun with {'; '.join(changed)}. Run it with the same input and settings. {advice}"
            )

    def _check_row(self, row_number: int, row: dict[str, Any]) -> None:
        """Checks that an existing row of the file answers the input's row ``row_number`` (from 1). Counts errors."""
        self.num_errors += bool(row.get("error"))
        if self._line_numbers is not None:
            line_number, openai_id = next(self._line_numbers, 0), f"batch_req_{row_number - 1}"  # 0: no such row
            # A row in the native format is identified by "line", a row in OpenAI's format by "id".
            if row.get("line") != line_number and row.get("id") != openai_id:
                raise ValueError(f"not the answer to row {row_number}")
