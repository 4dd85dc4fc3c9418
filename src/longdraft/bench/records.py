"""Files of records: JSON lines, a header first, then one for each record.

The header holds everything that figures depend on. A run with another header may not continue the file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from types import UnionType
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from longdraft.errors import CheckpointError, ConfigError
from longdraft.json_lines import JsonLines

T = TypeVar("T")

_SAMPLE = 1 << 20  # bytes of either end of a weight file that its fingerprint sees
# Entries of a header that figures do not depend on.
_LOOSE = ("created", "command", "memory_available_bytes")


class RecordFile(Generic[T]):
    """A file that records are added to.

    Args:
        header: this run's, from :func:`make_header`.
        kind: of the records: a dataclass whose fields are annotated, or ``dict``.

    Attributes:
        records: all of them, those that were in the file first.

    Raises:
        ConfigError: the file holds a run with another header; the message names the differences.
        CheckpointError: it cannot be read or written, or is no such file.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], record_type: type[T]) -> None:
        self.path, self.records, self._record_type = path, list[T](), record_type
        self._header: dict[str, Any] | None = None
        self._format, self._version = header["format"], header["version"]
        self._file = JsonLines(path, self._read_line)
        if self._header is None:
            if path.exists() and path.stat().st_size:
                raise self._wrong_file()
            self._file.append(header)
        elif differing := list(_differences(without_volatile(self._header), without_volatile(header))):
            shown = "; ".join(differing[:5]) + (f"; and {len(differing) - 5} more" if len(differing) > 5 else "")
            raise ConfigError(
                f"{path} holds another run ({shown}). Go on with the same settings, or name another file."
            )

    def _read_line(self, number: int, row: Any) -> None:
        """Keeps what a line of the file holds: the header, then a record each."""
        if number > 1:
            self.records.append(from_json(self._record_type, row))
        elif not isinstance(row, dict) or row.get("format") != self._format:
            raise self._wrong_file()
        elif row.get("version") != self._version:
            raise CheckpointError(
                f"{self.path} has format version {row.get('version')}, and this version of longdraft reads "
                f"{self._version}: name another file."
            )
        else:
            self._header = row

    def _wrong_file(self) -> CheckpointError:
        return CheckpointError(f"{self.path} is not a results file of this bench: give another name.")

    def append(self, record: T) -> None:
        """Adds a record, whose line is on the disk when this returns."""
        self._file.append(dataclasses.asdict(record) if dataclasses.is_dataclass(record) else record)  # type: ignore[arg-type]
        self.records.append(record)


def make_header(format_name: str, version: int, content: Mapping[str, Any]) -> dict[str, Any]:
    """A header as it is read back from a file: format, content, time and command."""
    said = {"created": datetime.now(timezone.utc).isoformat(timespec="seconds"), "command": _command()}
    found: dict[str, Any] = json.loads(json.dumps({"format": format_name, "version": version, **content, **said}))
    return found


def without_volatile(header: Any) -> Any:
    """A header without the entries that change by themselves."""
    if isinstance(header, Mapping):
        return {name: without_volatile(value) for name, value in header.items() if name not in _LOOSE}
    return [without_volatile(value) for value in header] if isinstance(header, list) else header


def fingerprint(weights: Path) -> str:
    """Fingerprint of a file or a folder's files: their names, sizes, first and last bytes."""
    digest = hashlib.sha256()
    for file in sorted(p for p in weights.glob("*") if p.is_file()) if weights.is_dir() else [weights]:
        if file.is_file():  # else a hub id
            size = file.stat().st_size
            digest.update(f"{file.name} {size} ".encode())
            with file.open("rb") as opened:
                digest.update(opened.read(_SAMPLE))
                opened.seek(max(0, size - _SAMPLE))
                digest.update(opened.read())
    return f"{weights.name} {digest.hexdigest()[:16]}"


def jsonable(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with values that JSON can hold."""
    held = (int, float, bool, str, tuple, type(None))
    return {name: x if isinstance(x, held) else str(x) for name, x in options.items()}


def _command() -> str:
    """The command line of this process, quoted for a shell."""
    program, *arguments = sys.argv
    name = Path(program).name
    return shlex.join(["longdraft" if name == "__main__.py" else name, *arguments])


def _differences(there: Any, here: Any, name: str = "") -> Iterator[str]:
    """Differences between a file's header and a run's, a text each."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in dict.fromkeys((*there, *here)):
            yield from _differences(there.get(key), here.get(key), f"{name}.{key}" if name else key)
    elif there != here:
        yield f"{name}: {json.dumps(there)} there, {json.dumps(here)} here"


def from_json(expected: Any, value: Any) -> Any:
    """A value of an annotated type from what JSON has for it: a dataclass from an object, a tuple from a list.

    Keys that are no fields are passed over, and fields without a key have their default.

    Raises:
        TypeError: it is of another type, or holds NaN.
    """
    origin, inner = get_origin(expected), get_args(expected)
    if dataclasses.is_dataclass(expected):
        hints = get_type_hints(expected)
        return expected(**{name: from_json(hints[name], value[name]) for name in hints if name in value})  # type: ignore[operator]
    if origin in (Union, UnionType):
        return value if value is None and type(None) in inner else from_json(inner[0], value)
    if expected is Any:
        return value
    named: Any = origin or expected
    wanted: Any = {float: (int, float), tuple: (list, tuple)}.get(named, named)
    # A truth value is an int to Python, and NaN is not even itself.
    if not isinstance(value, wanted) or value != value or isinstance(value, bool) != (expected is bool):
        raise TypeError(f"{value!r:.40} in the place of {expected}")
    if isinstance(value, dict) and inner:
        return {name: from_json(inner[1], each) for name, each in value.items()}
    if origin is tuple:
        kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
        return tuple(from_json(one, each) for one, each in zip(kinds, value, strict=True))
    return [from_json(inner[0], each) for each in value] if inner else value
