"""Files of records: a header, then a line for each record, written at once.

The header holds everything that figures depend on. A run with another header may not continue the file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import datetime, timezone
from pathlib import Path
from types import UnionType
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from longdraft.errors import CheckpointError, ConfigError
from longdraft.files import naming, regular

T = TypeVar("T")

_SAMPLE = 1 << 20  # bytes of either end of a weight file that its fingerprint sees
# Entries of the hardware that change from run to run on the same machine.
_LOOSE = ("memory_available_bytes",)
# Entries of the header that figures do not depend on.
_REMARKS = ("created", "command")


class JsonLines(Generic[T]):
    """A file that records are added to.

    Args:
        header: this run's, from :func:`signed`.
        parsed: makes a record from a line's object.
        written: makes a line's object from a record; None: its fields.

    Attributes:
        records: all of them, those that were in the file first.

    Raises:
        ConfigError: the file holds a run with another header; the message names the differences.
        CheckpointError: it cannot be read or written, or is no such file.
    """

    def __init__(
        self,
        path: Path,
        header: Mapping[str, Any],
        parsed: Callable[[dict[str, Any]], T],
        written: Callable[[T], Mapping[str, Any]] | None = None,
    ) -> None:
        self.path, self._written = path, written or _fields
        self.records: list[T] = []
        if path.exists() and path.stat().st_size:
            kept, there, self.records = contents(path, header["format"], header["version"], parsed)
            if differing := list(_differences(decisive(there), decisive(header))):
                shown = "; ".join(differing[:5]) + (f"; and {len(differing) - 5} more" if len(differing) > 5 else "")
                raise ConfigError(
                    f"{path} holds another run ({shown}). Go on with the same settings, or name another file."
                )
            with _failures(path, "written"), path.open("r+b") as file:
                file.truncate(kept)
        else:
            self._append(header)

    def append(self, record: T) -> None:
        """Adds a record, whose line is on the disk when this returns."""
        self._append(self._written(record))
        self.records.append(record)

    def _append(self, content: Mapping[str, Any]) -> None:
        with _failures(self.path, "written"), self.path.open("ab") as file:
            file.write(json.dumps(content).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _fields(record: Any) -> Mapping[str, Any]:
    """A record's fields by name, those of a dataclass or of a mapping."""
    found: Mapping[str, Any] = dataclasses.asdict(record) if dataclasses.is_dataclass(record) else record  # type: ignore[arg-type]
    return found


def signed(form: str, version: int, content: Mapping[str, Any]) -> dict[str, Any]:
    """A header as it is read back from a file: format, content, time and command."""
    said = {"created": datetime.now(timezone.utc).isoformat(timespec="seconds"), "command": _command()}
    found: dict[str, Any] = json.loads(json.dumps({"format": form, "version": version, **content, **said}))
    return found


def contents(
    path: Path, form: str, version: int, parsed: Callable[[dict[str, Any]], T]
) -> tuple[int, dict[str, Any], list[T]]:
    """Size in bytes, header and records of a file, without a torn last line.

    Raises:
        CheckpointError: it cannot be read, or is no file of this format and version.
    """
    with _failures(path, "read"):
        content = regular(path).read_bytes()
    whole = content.rfind(b"\n") + 1
    first, *rest = content[:whole].splitlines() or [b""]
    try:
        found = json.loads(first)
        known = found["format"] == form
    except (ValueError, KeyError, TypeError, RecursionError):
        known = False
    if not known:
        raise CheckpointError(f"{path} is not a results file of this bench: give another name.")
    if found.get("version") != version:
        raise CheckpointError(
            f"{path} has format version {found.get('version')}, and this version of longdraft reads {version}: name "
            "another file."
        )
    measured = []
    for number, text in enumerate(rest, 2):
        try:
            measured.append(made := parsed(json.loads(text)))
            if not _fits(made, type(made)):
                raise TypeError("a value of another type than it has there")
        except Exception as error:  # no list of types would be complete
            raise CheckpointError(
                f"{path}:{number} is damaged ({error!r}): delete that line, and run again to measure it anew."
            ) from None
    return whole, found, measured


def decisive(header: Mapping[str, Any]) -> dict[str, Any]:
    """A header without the entries that change by themselves."""
    hardware = {k: v for k, v in mapping(header.get("hardware")).items() if k not in _LOOSE}
    gpus = [{k: v for k, v in mapping(gpu).items() if k not in _LOOSE} for gpu in hardware.get("gpus") or []]
    said = {k: v for k, v in header.items() if k not in _REMARKS}
    return {**said, "hardware": {**hardware, "gpus": gpus}}


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


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with values that JSON can hold."""
    held = (int, float, bool, str, tuple, type(None))
    return {name: x if isinstance(x, held) else str(x) for name, x in options.items()}


def mapping(value: Any) -> dict[str, Any]:
    """A value of a results file that should be an object; empty if it is none."""
    return dict(value) if isinstance(value, Mapping) else {}


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


def _failures(path: Path, what: str) -> AbstractContextManager[None]:
    """Turns errors of the file system into CheckpointErrors."""
    return naming(path, f"{path} cannot be {what}")


def _fits(value: Any, kind: Any) -> bool:
    """True if a value, and all within it, is of the annotated type, and no number is NaN."""
    origin, inner = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return isinstance(value, kind) and all(_fits(getattr(value, name), each) for name, each in hints.items())  # type: ignore[arg-type]
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in inner)
    if kind is Any or kind in (int, float) or origin is None:
        plain = {int: int, float: int | float, Any: object}.get(kind, kind)
        return isinstance(value, plain) and value == value and isinstance(value, bool) <= (kind in (bool, Any))
    if not isinstance(value, origin):
        return False
    if issubclass(origin, Mapping):
        return all(_fits(name, inner[0]) and _fits(each, inner[1]) for name, each in value.items())
    if origin is tuple and inner[-1] is not Ellipsis:
        return len(value) == len(inner) and all(map(_fits, value, inner))
    return all(_fits(each, inner[0]) for each in value)
