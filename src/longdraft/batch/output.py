"""The file of answers: a line a row, in order. Whatever ends the process, at most its last line is torn.

Beside it stands ``<name>.run``, which says what the answers were made from and with: a run goes on with a file only
where both are the same.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longdraft.errors import CheckpointError, ConfigError, LongdraftError

_FORMAT = {"format": "longdraft batch", "version": 1}
# Seconds between two times that what was written is made safe against a loss of power.
_SYNC = 5.0


class Output:
    """A file that rows are added to; the next run goes on behind the last whole one.

    Args:
        made: from and with what; name -> value, as JSON holds it.

    Attributes:
        rows: how many there are. errors: those of them that say why there is no answer. found: rows at the start.

    Raises:
        ConfigError: the file was begun with another input or other settings; says which.
        CheckpointError: it cannot be read or written, another run writes it, or it is no such file.
    """

    def __init__(self, path: Path, made: Mapping[str, Any]) -> None:
        self.path, self._beside = path, path.with_name(path.name + ".run")
        self.rows = self.errors = 0
        self._ends: list[int] = []  # of the last rows: they may be taken back
        with self._failing("written"):
            self._file = path.open("ab", buffering=0)
        try:
            self._lock()
            self._settle({**_FORMAT, **json.loads(json.dumps(made))})
            self._ends = [self._find()]
            with self._failing("written"):
                self._file.truncate(self._ends[-1])
        except BaseException:
            self._file.close()
            raise
        self.found, self._synced = self.rows, time.monotonic()

    def write(self, row: Mapping[str, Any], failed: bool) -> None:
        """Adds a row, which a killed process does not lose any more.

        Raises:
            CheckpointError: the disk does not take it. What is there of it has been cut off.
        """
        line = json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        left = memoryview(line)
        try:
            while left:
                left = left[self._file.write(left) or 0 :]
            if time.monotonic() - self._synced > _SYNC:
                self._sync()
        except OSError as error:
            self._cut(self._ends[-1])
            raise CheckpointError(
                f"{self.path} cannot be written: {error.strerror}. Its {self.rows} rows are whole: make room, and run "
                "the same command again to go on."
            ) from error
        self._ends = [*self._ends[-64:], self._ends[-1] + len(line)]
        self.rows += 1
        self.errors += failed

    def take_back(self, rows: int) -> None:
        """The last rows, up to 64 errors of this run, as if they had not been written."""
        self._ends = self._ends[: len(self._ends) - rows]
        self._cut(self._ends[-1])
        self.rows -= rows
        self.errors -= rows

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

    def _cut(self, size: int) -> None:
        with self._failing("written"):
            self._file.truncate(size)

    def _lock(self) -> None:
        """Two runs of one file would answer every row twice. Where the system has no such locks, nobody looks."""
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

    def _settle(self, made: dict[str, Any]) -> None:
        """Says what the file is made from, or compares it with what it was begun with."""
        with self._failing("written"):
            empty = self.path.stat().st_size == 0
        advice = f"Name another file, or delete {self.path} and {self._beside} to begin again."
        if not empty:
            try:
                there = json.loads(self._beside.read_text(encoding="utf-8"))
                known = {name: there[name] for name in _FORMAT} == _FORMAT
            except (OSError, ValueError, KeyError, TypeError):
                known = False
            if not known:
                raise ConfigError(
                    f"{self.path} is there already, and {self._beside.name} beside it does not say what it was made "
                    f"from: a run cannot go on with it. {advice}"
                )
            if other := [f"{name} {there.get(name)!r}, not {made.get(name)!r}" for name in {**there, **made}
                         if there.get(name) != made.get(name)]:  # fmt: skip
                raise ConfigError(
                    f"{self.path} was begun with {'; '.join(other)}. Run it with what it was begun with. {advice}"
                )
            return
        part = self._beside.with_name(self._beside.name + ".part")
        with self._failing("written"):
            part.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
            part.replace(self._beside)

    def _find(self) -> int:
        """Counts whole rows; returns the byte behind the last one."""
        size = 0
        with self._failing("read"), self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    self.errors += bool(json.loads(line).get("error"))
                except (ValueError, AttributeError):
                    raise CheckpointError(
                        f"{self.path}:{number} is damaged: cut the file off before that line, and run again."
                    ) from None
                self.rows += 1
                size += len(line)
        return size

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        """Inside it, a file that cannot be used ends in a CheckpointError."""
        try:
            yield
        except LongdraftError:
            raise
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be {what}: {error.strerror}.") from error
