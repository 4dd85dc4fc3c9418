"""The file of answers: one line for each row, in order. If the process is killed, at most the last line is torn.

``<name>.run`` beside it records the input and the settings: a run continues a file only if both are the same.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from longdraft.errors import CheckpointError, ConfigError
from longdraft.files import naming, read_json, regular

_FORMAT = {"format": "longdraft batch", "version": 1}
# Seconds between two calls of fsync.
_SYNC = 5.0


class Output:
    """The file that rows are appended to; the next run continues after the last whole row.

    Args:
        origin: the input and the settings; name -> JSON value. places: line numbers of the input's rows; None: unknown.

    Attributes:
        rows: how many rows the file has. errors: how many of them are errors. found: how many it had at the start.

    Raises:
        ConfigError: the file was begun with another input or other settings, or has no record of them.
        CheckpointError: the file cannot be read or written, is damaged, or another run writes it.
    """

    def __init__(self, path: Path, origin: Mapping[str, Any], places: Iterable[int] | None = None) -> None:
        self.path, self._record = path, path.with_name(path.name + ".run")
        self.rows = self.errors = 0
        with self._failing("written"):
            self._file = regular(path).open("ab", buffering=0)
        try:
            self._lock()
            self._check_origin({**_FORMAT, **json.loads(json.dumps(origin))})
            self._end = self._count(None if places is None else iter(places))
            with self._failing("written"):
                self._file.truncate(self._end)
        except BaseException:
            self._file.close()
            raise
        self.found, self._synced = self.rows, time.monotonic()

    def write(self, row: Mapping[str, Any], failed: bool) -> None:
        """Appends a row; it outlives a killed process.

        Raises:
            CheckpointError: the disk is full or fails. An incomplete row is cut off.
        """
        line = json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        left = memoryview(line)
        try:
            while left:
                left = left[self._file.write(left) or 0 :]
            if time.monotonic() - self._synced > _SYNC:
                self._sync()
        except OSError as error:
            with self._failing("written"):
                self._file.truncate(self._end)
            raise CheckpointError(
                f"{self.path} cannot be written: {error.strerror}. Its {self.rows} rows are whole: make room, and run "
                "the same command again to go on."
            ) from error
        self._end += len(line)
        self.rows += 1
        self.errors += failed

    def close(self) -> None:
        try:
            self._sync()
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be written: {error.strerror}.") from error
        finally:
            self._file.close()

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def _lock(self) -> None:
        """Refuses a second run on the file, where the system has locks."""
        try:
            import fcntl
        except ImportError:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"Another run is writing {self.path}: wait for it, or name another file.") from None
        except OSError:  # a file system without locks
            return

    def _check_origin(self, origin: dict[str, Any]) -> None:
        """Writes the record of an empty file; compares that of another."""
        with self._failing("written"):
            if self.path.stat().st_size == 0:
                part = self._record.with_name(self._record.name + ".part")
                part.write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
                part.replace(self._record)
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

    def _count(self, places: Iterator[int] | None) -> int:
        """Counts the whole rows, which say what they answer. Returns the offset of their end."""
        size = 0
        with self._failing("read"), self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    row = json.loads(line)
                    self.errors += bool(row.get("error"))
                    if places and row.get("line") != next(places, 0) and row.get("id") != f"batch_req_{self.rows}":
                        raise ValueError
                except (ValueError, AttributeError, RecursionError):
                    raise CheckpointError(
                        f"{self.path}:{number} is damaged, or not the answer to row {self.rows + 1}: cut the file off "
                        "before that line, and run again."
                    ) from None
                self.rows += 1
                size += len(line)
        return size

    def _failing(self, what: str) -> AbstractContextManager[None]:
        """Turns an error inside it into a CheckpointError."""
        return naming(self.path, f"{self.path} cannot be {what}")
