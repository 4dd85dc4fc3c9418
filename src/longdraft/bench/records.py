"""Keeps the records of a measurement in a file of JSON lines: a header in the first line, then a record a line.

The header holds everything that the figures depend on. A run with another header may not continue the file.
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
_SAMPLED_BYTES = 1 << 20  # a fingerprint reads this many bytes at each end of a weight file: reading all is slow
# Entries of a header that differ between runs with the same figures.
_VOLATILE = ("created", "command", "memory_available_bytes")


class RecordFile(Generic[T]):
    """Keeps records in a file. Writes the header to a new file; continues an existing file.

    Args:
        header: the header of this run, from :func:`make_header`.
        record_type: a dataclass with annotated fields, or ``dict``.

    Attributes:
        records: the records of the file, then the appended ones.

    Raises:
        ConfigError: the file holds a run with another header; the message names the differences.
        CheckpointError: the file cannot be read or written, or does not hold records.
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
        elif changes := list(_differences(without_volatile(self._header), without_volatile(header))):
            message = "; ".join(changes[:5]) + (f"; and {len(changes) - 5} more" if len(changes) > 5 else "")
            raise ConfigError(f"{path} holds another run ({message}): keep its settings, or name another file.")

    def _read_line(self, number: int, content: Any) -> None:
        """Stores a parsed line: line 1 is the header, every other line is a record."""
        if number > 1:
            self.records.append(from_json(self._record_type, content))
        elif not isinstance(content, dict) or content.get("format") != self._format:
            raise self._wrong_file()
        elif content.get("version") != self._version:
            raise CheckpointError(
                f"{self.path} has format version {content.get('version')}, and this version of longdraft reads "
                f"{self._version}: name another file."
            )
        else:
            self._header = content

    def _wrong_file(self) -> CheckpointError:
        return CheckpointError(f"{self.path} is not a results file of this command: give another name.")

    def append(self, record: T) -> None:
        """Adds a record. When this method returns, the record is on the disk."""
        self._file.append(dataclasses.asdict(record) if dataclasses.is_dataclass(record) else record)  # type: ignore[arg-type]
        self.records.append(record)


def make_header(format_name: str, version: int, content: Mapping[str, Any]) -> dict[str, Any]:
    """Makes a header of format, content, time and command. Tuples become lists, as in a header read from a file."""
    time_and_command = {"created": datetime.now(timezone.utc).isoformat(timespec="seconds"), "command": _command()}
    entries = {"format": format_name, "version": version, **content, **time_and_command}
    header: dict[str, Any] = json.loads(json.dumps(entries))
    return header


def without_volatile(header: Any) -> Any:
    """Removes from a header the entries that differ between runs with the same figures."""
    if isinstance(header, Mapping):
        return {name: without_volatile(value) for name, value in header.items() if name not in _VOLATILE}
    return [without_volatile(value) for value in header] if isinstance(header, list) else header


def fingerprint(weights: Path) -> str:
    """Identifies a weight file or a folder by its name and a digest of each file's name, size, first and last bytes."""
    digest = hashlib.sha256()
    for file in sorted(p for p in weights.glob("*") if p.is_file()) if weights.is_dir() else [weights]:
        if file.is_file():  # otherwise ``weights`` is a hub id, and only its name counts
            size = file.stat().st_size
            digest.update(f"{file.name} {size} ".encode())
            with file.open("rb") as stream:
                digest.update(stream.read(_SAMPLED_BYTES))
                stream.seek(max(0, size - _SAMPLED_BYTES))
                digest.update(stream.read())
    return f"{weights.name} {digest.hexdigest()[:16]}"


def jsonable(options: Mapping[str, Any]) -> dict[str, Any]:
    """Converts values that JSON cannot hold to strings."""
    json_types = (int, float, bool, str, tuple, type(None))
    return {name: value if isinstance(value, json_types) else str(value) for name, value in options.items()}


def _command() -> str:
    """Returns the command line of this process, quoted for a shell."""
    program, *arguments = sys.argv
    name = Path(program).name
    return shlex.join(["longdraft" if name == "__main__.py" else name, *arguments])


def _differences(file_header: Any, run_header: Any, name: str = "") -> Iterator[str]:
    """Compares the header of a file with the header of this run. Yields texts such as ``seed: 0 there, 3 here``."""
    if isinstance(file_header, dict) and isinstance(run_header, dict):
        for key in dict.fromkeys((*file_header, *run_header)):
            yield from _differences(file_header.get(key), run_header.get(key), f"{name}.{key}" if name else key)
    elif file_header != run_header:
        yield f"{name}: {json.dumps(file_header)} there, {json.dumps(run_header)} here"


def from_json(expected: Any, value: Any) -> Any:
    """Converts a JSON value to the type ``expected``: an object to a dataclass, a list to a tuple.

    A key that is no field of the dataclass is ignored. A field without a key gets its default.

    Raises:
        TypeError: the value has another type, or holds NaN.
    """
    origin, inner = get_origin(expected), get_args(expected)  # dict[str, int]: dict and (str, int)
    if dataclasses.is_dataclass(expected):
        hints = get_type_hints(expected)
        return expected(**{name: from_json(hints[name], value[name]) for name in hints if name in value})  # type: ignore[operator]
    if origin in (Union, UnionType):  # of one type and None
        return value if value is None and type(None) in inner else from_json(inner[0], value)
    if expected is Any:
        return value
    plain_type: Any = origin or expected
    accepted: Any = {float: (int, float), tuple: (list, tuple)}.get(plain_type, plain_type)
    # A bool is an instance of int, but is refused in place of a number. ``value != value`` is true for NaN only.
    if not isinstance(value, accepted) or value != value or isinstance(value, bool) != (expected is bool):
        raise TypeError(f"{value!r:.40} in the place of {expected}")
    if isinstance(value, dict) and inner:
        return {name: from_json(inner[1], item) for name, item in value.items()}
    if origin is tuple:
        types = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
        return tuple(from_json(item_type, item) for item_type, item in zip(types, value, strict=True))
    return [from_json(inner[0], item) for item in value] if inner else value
