"""Rows of data sets: from the Hugging Face hub, and from local files, folders and zip archives."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePath
from typing import Any

from longdraft.errors import CapabilityError, PromptError, reason_of
from longdraft.files import file_errors, require_regular

_TEXTS = (".jsonl", ".json", ".txt")
_TABLES = {".parquet": "parquet", ".csv": "csv"}


@dataclass(frozen=True)
class Example:
    """A row as it is stored. ``origin``: its file and line. ``stem``: its file's name without the suffix."""

    columns: Mapping[str, Any]
    origin: str
    stem: str


def read_jsonl(path: Path, limit: int | None = None) -> list[Example]:
    """The first ``limit`` rows of a JSONL file.

    Raises:
        PromptError: it is missing, empty or not JSONL. Names file and line.
    """
    if path.is_dir():
        raise PromptError(f"{path} is a folder: --data takes a JSONL file.")
    return _some(_lines(require_regular(path), path.stem, limit), path)


def read_path(path: Path, name: str, limit: int | None = None) -> list[Example]:
    """The first ``limit`` rows of a file, or of each file of a folder or a zip archive.

    Args:
        name: of a folder or an archive only files of this name are read (``gov_report.read_jsonl``), if there are any. Text
            files (``.txt``) are a row each, in the column ``read_text``.

    Raises:
        PromptError: there is no such file, or it cannot be read.
        CapabilityError: a parquet or CSV file, and the ``datasets`` library is missing.
    """
    if not path.exists():
        raise PromptError(f"There is no file {path}: check the path.")
    files: list[Any] = [path]
    kinds: tuple[str, ...] = (*_TEXTS, *_TABLES)
    if zipfile.is_zipfile(require_regular(path)):
        with zipfile.ZipFile(path) as archive:
            files, kinds = [zipfile.Path(path, member) for member in archive.namelist()], _TEXTS
    elif path.is_dir():
        files = sorted(path.rglob("*"))
    if files != [path]:
        able = [file for file in files if PurePath(file.name).suffix in kinds]
        files = [file for file in able if PurePath(file.name).stem == name] or able
        if all(file.name.endswith(".txt") for file in files):  # a row each
            files = files[:limit]
    return _some((row for file in files for row in _of_file(file, limit)), path)


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        PromptError: it cannot be read.
    """
    with _reading(path):
        return require_regular(path).read_text(encoding="utf-8")


def read_hub(name: str, hub: Mapping[str, Any], limit: int | None = None) -> list[Example]:
    """The first ``limit`` rows of a data set of the hub; only as much is downloaded as is read.

    Args:
        hub: arguments of ``datasets.load_dataset``.

    Raises:
        CapabilityError: the ``datasets`` library is missing, or the hub cannot be reached.
    """

    def unread(why: str) -> CapabilityError:  # no network, no such data set, an archive that is laid out otherwise now
        return CapabilityError(
            f"{name} cannot be read from the Hugging Face hub ({why}). Where the hub is out of reach, "
            f"fetch its file elsewhere and give it: --data {name}=FILE (.jsonl, .parquet, .csv)."
        )

    return _loaded(name, name, limit, unread, **hub)


def _some(rows: Iterable[Example], path: Path) -> list[Example]:
    if found := list(rows):
        return found
    raise PromptError(f"{path} has no rows.")


def _reading(file: object) -> AbstractContextManager[None]:
    """Errors of the file system, and of what is no text or JSON, name the file."""
    return file_errors(str(file), f"{file} cannot be read", "Check the path; it is text in UTF-8.", PromptError)


def _of_file(file: Any, limit: int | None) -> Iterator[Example]:
    """Rows of a file, which may lie in an archive."""
    name = PurePath(file.name)
    if kind := _TABLES.get(name.suffix):

        def unread(why: str) -> PromptError:  # whatever a bad file sets off in one of several readers
            return PromptError(f"{file} cannot be read as {kind}: {why}.")

        yield from _loaded(str(file), name.stem, limit, unread, path=kind, data_files=str(file), split="train")
    elif name.suffix in (".json", ".txt"):
        with _reading(file):
            whole = file.read_text(encoding="utf-8")
            found = [{"text": whole}] if name.suffix == ".txt" else json.loads(whole)
        for i, row in enumerate((found if isinstance(found, list) else [found])[:limit], 1):
            yield Example(row, str(file) if name.suffix == ".txt" else f"{file}:{i}", name.stem)
    else:
        yield from _lines(file, name.stem, limit)


def _lines(file: Any, stem: str, limit: int | None) -> Iterator[Example]:
    """Rows of a JSONL file."""
    with _reading(file), file.open(encoding="utf-8") as lines:
        written = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
        for number, line in islice(written, limit):
            origin = f"{file}:{number}"
            try:
                row: Any = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise PromptError(f"{origin} is not JSON ({error}): each line holds one object.") from None
            if not isinstance(row, dict):
                raise PromptError(f"{origin} holds {type(row).__name__}, not an object.")
            yield Example(row, origin, stem)


def _loaded(
    shown: str, stem: str, limit: int | None, unread: Callable[[str], Exception], **where: Any
) -> list[Example]:
    """Rows by the ``datasets`` library.

    Raises:
        CapabilityError: it is missing.
    """
    from longdraft.model.checkpoints import quiet

    try:
        from datasets import load_dataset
    except ImportError:
        raise CapabilityError(
            'Data sets by name and parquet files need the datasets library: pip install "longdraft[data]". JSONL files '
            "need nothing: --data FILE.jsonl, or --data gov_report=FILE.jsonl."
        ) from None
    try:
        with quiet():
            stream = load_dataset(**where, streaming=True)
            return [Example(dict(row), f"{shown}:{i}", stem) for i, row in enumerate(islice(stream, limit), 1)]
    except Exception as error:
        raise unread(reason_of(error)) from error
