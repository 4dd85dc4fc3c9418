"""Reads the rows of data sets (examples) from the Hugging Face hub, and from local files, folders and zip archives."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePath
from typing import Any

from longdraft.errors import CapabilityError, PromptError, needs_extra, reason_of
from longdraft.files import file_errors, require_regular

_TEXT_SUFFIXES = (".jsonl", ".json", ".txt")
_TABLE_BUILDERS = {".parquet": "parquet", ".csv": "csv"}  # suffix -> builder of the datasets library
MakeError = Callable[[str], Exception]


@dataclass(frozen=True)
class Example:
    """A row of a data set."""

    columns: Mapping[str, Any]
    origin: str  # file and line, for error messages
    stem: str  # the file's name without its suffix


def read_jsonl(path: Path, limit: int | None = None) -> list[Example]:
    """Reads the first ``limit`` rows of a JSONL file.

    Raises:
        PromptError: the file is missing, empty or not JSONL. The message names file and line.
    """
    if path.is_dir():
        raise PromptError(f"{path} is a folder: --data takes a JSONL file.")
    return _not_empty(_read_lines(require_regular(path), path.stem, limit), path)


def read_path(path: Path, name: str, limit: int | None = None) -> list[Example]:
    """Reads the first ``limit`` rows of a file, or of each file of a folder or a zip archive.

    Args:
        path: a JSONL, JSON, parquet or CSV file; a text file, which is one row with the column ``text``; or a folder or
            an archive of such files.
        name: if a folder or an archive has files with this stem (``gov_report.jsonl``), only these are read.

    Raises:
        PromptError: there is no such file, or it cannot be read.
        CapabilityError: the file is parquet or CSV, and the ``datasets`` library is missing.
    """
    if not path.exists():
        raise PromptError(f"There is no file {path}: check the path.")
    files: list[Any] = [path]
    suffixes: tuple[str, ...] = (*_TEXT_SUFFIXES, *_TABLE_BUILDERS)
    if zipfile.is_zipfile(require_regular(path)):
        with zipfile.ZipFile(path) as archive:
            files, suffixes = [zipfile.Path(path, member) for member in archive.namelist()], _TEXT_SUFFIXES
    elif path.is_dir():
        files = sorted(path.rglob("*"))
    if files != [path]:
        readable = [file for file in files if PurePath(file.name).suffix in suffixes]
        files = [file for file in readable if PurePath(file.name).stem == name] or readable
        if all(file.name.endswith(".txt") for file in files):  # a text file is one row, so the limit counts files
            files = files[:limit]
    return _not_empty((example for file in files for example in _read_file(file, limit)), path)


def read_text(path: Path) -> str:
    """Reads the text of a file.

    Raises:
        PromptError: the file cannot be read.
    """
    with _named_errors(path):
        return require_regular(path).read_text(encoding="utf-8")


def read_hub(name: str, hub: Mapping[str, Any], limit: int | None = None) -> list[Example]:
    """Reads the first ``limit`` rows of a data set of the hub. The other rows are not downloaded.

    Args:
        name: the data set's name, for error messages.
        hub: arguments of ``datasets.load_dataset``.

    Raises:
        CapabilityError: the ``datasets`` library is missing, or the hub cannot be reached.
    """

    def make_error(why: str) -> CapabilityError:  # no network, no such data set, or its layout has changed
        return CapabilityError(
            f"{name} cannot be read from the Hugging Face hub ({why}). Where the hub is out of reach, "
            f"fetch the file elsewhere and give it: --data {name}=FILE (.jsonl, .parquet, .csv)."
        )

    return _load_dataset(name, name, limit, make_error, **hub)


def _not_empty(examples: Iterable[Example], path: Path) -> list[Example]:
    if rows := list(examples):
        return rows
    raise PromptError(f"{path} has no rows: give another file.")


def _named_errors(file: object) -> AbstractContextManager[None]:
    """Converts errors of reading and of decoding (UTF-8, JSON) to a PromptError that names the file."""
    return file_errors(str(file), f"{file} cannot be read", "Check the path; it is text in UTF-8.", PromptError)


def _read_file(file: Any, limit: int | None) -> Iterator[Example]:
    """Yields the rows of a file, which may lie in an archive."""
    name = PurePath(file.name)
    if kind := _TABLE_BUILDERS.get(name.suffix):

        def make_error(why: str) -> PromptError:  # the readers raise many classes of errors for a bad file
            return PromptError(f"{file} cannot be read as {kind}: {why}.")

        yield from _load_dataset(
            str(file), name.stem, limit, make_error, path=kind, data_files=str(file), split="train"
        )
    elif name.suffix in (".json", ".txt"):
        with _named_errors(file):
            content = file.read_text(encoding="utf-8")
            rows = [{"text": content}] if name.suffix == ".txt" else json.loads(content)
        for i, row in enumerate((rows if isinstance(rows, list) else [rows])[:limit], 1):
            yield Example(row, str(file) if name.suffix == ".txt" else f"{file}:{i}", name.stem)
    else:
        yield from _read_lines(file, name.stem, limit)


def _read_lines(file: Any, stem: str, limit: int | None) -> Iterator[Example]:
    """Yields the rows of a JSONL file."""
    with _named_errors(file), file.open(encoding="utf-8") as lines:
        not_blank = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
        for number, line in islice(not_blank, limit):
            origin = f"{file}:{number}"
            try:
                row: Any = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise PromptError(f"{origin} is not JSON ({error}): each line holds one object.") from None
            if not isinstance(row, dict):
                raise PromptError(f"{origin} holds {type(row).__name__}: each line holds one object.")
            yield Example(row, origin, stem)


def _load_dataset(origin: str, stem: str, limit: int | None, make_error: MakeError, **kwargs: Any) -> list[Example]:
    """Reads rows by ``datasets.load_dataset(**kwargs)``. Raises ``make_error(reason)`` if the library fails."""
    from longdraft.model.load.checkpoints import quiet

    with needs_extra("data", "Data sets by name, parquet and CSV files need the datasets library, JSONL files do not"):
        from datasets import load_dataset
    try:
        with quiet():
            stream = load_dataset(**kwargs, streaming=True)
            return [Example(dict(row), f"{origin}:{i}", stem) for i, row in enumerate(islice(stream, limit), 1)]
    except Exception as cause:
        raise make_error(reason_of(cause)) from cause
