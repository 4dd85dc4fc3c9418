"""Results of measurements on this machine, kept in small files for later processes."""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longdraft.folders import cache_folder

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger("longdraft")


class MeasurementCache:
    """Keeps one JSON value for each kind of measurement, a file each.

    A kind is a dataclass that holds everything the result depends on.

    Args:
        name: folder in the package's cache.
        version: raise it when the values change their meaning.
        folder: use this folder instead.
    """

    def __init__(self, name: str, version: int, folder: Path | None = None) -> None:
        self._name, self._version, self._folder = name, version, folder

    def load(self, kind: DataclassInstance) -> Any:
        """The saved value; None if there is none, or if its file is damaged or of another version."""
        try:
            saved = json.loads(self._file(kind).read_text(encoding="utf-8"))
            return saved["choice"] if saved["format"] == self._version and saved["kind"] == _as_json(kind) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save(self, kind: DataclassInstance, value: Any) -> None:
        """Saves a value. If the file cannot be written, the next process measures again."""
        file = self._file(kind)
        temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            content = {"format": self._version, "kind": _as_json(kind), "choice": value}
            temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            temporary.replace(file)
        except OSError as error:
            logger.info("Measurements cannot be saved in %s: %s", file, error.strerror)
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _file(self, kind: DataclassInstance) -> Path:
        digest = hashlib.sha256(json.dumps(_as_json(kind), sort_keys=True).encode()).hexdigest()[:16]
        return (self._folder or cache_folder() / self._name) / f"{digest}.json"


def _as_json(kind: DataclassInstance) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(json.dumps(asdict(kind)))
    return fields
