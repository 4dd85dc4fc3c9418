"""Rows of data sets: from the Hugging Face hub, and from local files, folders and zip archives."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePath
from typing import IO, Any

from longdraft.bench import data
from longdraft.errors import CapabilityError, PromptError, reason_of
from longdraft.files import regular

_TEXTS = (".jsonl", ".json", ".txt")
_TABLES = {".parquet": "parquet", ".csv": "csv"}


@dataclass(frozen=True)
class Row:
    """A row as it is stored. ``origin``: its file and line. ``stem``: its file's name without the suffix."""

    columns: Mapping[str, Any]
    origin: str
    stem: str


def of_path(path: Path, name: str, limit: int | None = None) -> list[Row]:
    """The first ``limit`` rows of a file, or of each file of a folder or a zip archive.

    Args:
        name: of a folder or an archive only files of this name are read (``gov_report.jsonl``), if there are any. Text
            files (``.txt``) are a row each, in the column ``text``.

    Raises:
        PromptError: there is no such file, or it cannot be read.
        CapabilityError: a parquet or CSV file, and the ``datasets`` library is missing.
    """
    if not path.exists():
        raise PromptError(f"There is no file {path}: check the path.")
    if zipfile.is_zipfile(regular(path)):
        with zipfile.ZipFile(path) as archive:
            inside = _chosen([PurePath(member) for member in archive.namelist()], name, _TEXTS, limit)
            found = [row for member in inside for row in _opened(archive.open(str(member)), member, path, limit)]
    elif path.is_dir():
        files = _chosen(sorted(path.rglob("*")), name, (*_TEXTS, *_TABLES), limit)
        found = [row for file in files for row in _of_file(Path(file), limit)]
    else:
        found = list(_of_file(path, limit))
    if not found:
        raise PromptError(f"{path} has no rows.")
    return found


def of_hub(name: str, hub: Mapping[str, Any], limit: int | None = None) -> list[Row]:
    """The first ``limit`` rows of a data set of the hub; only as much is downloaded as is read.

    Args:
        hub: arguments of ``datasets.load_dataset``.

    Raises:
        CapabilityError: the ``datasets`` library is missing, or the hub cannot be reached.
    """
    from longdraft.model.checkpoints import quiet

    load = _library()
    try:
        with quiet():
            stream = load(**hub, streaming=True)
            return [Row(dict(row), f"{name}:{i}", name) for i, row in enumerate(islice(stream, limit), 1)]
    except Exception as error:  # no network, no such data set, an archive that is laid out otherwise now
        raise CapabilityError(
            f"{name} cannot be read from the Hugging Face hub ({reason_of(error)}). Where the hub is out of reach, "
            f"fetch its file elsewhere and give it: --data {name}=FILE (.jsonl, .parquet, .csv)."
        ) from error


def _chosen(files: Sequence[PurePath], name: str, suffixes: tuple[str, ...], limit: int | None) -> Sequence[PurePath]:
    """The files with rows: those of the name if there are any, else all; of texts, which are a row each, ``limit``."""
    able = [file for file in files if file.suffix in suffixes]
    able = [file for file in able if file.stem == name] or able
    return able[:limit] if all(file.suffix == ".txt" for file in able) else able


def _of_file(path: Path, limit: int | None) -> Iterator[Row]:
    if path.suffix in _TABLES:
        yield from _table(path, limit)
    elif path.suffix in (".json", ".txt"):
        yield from _opened(path.open("rb"), path, None, limit)
    else:
        yield from (Row(columns, origin, path.stem) for columns, origin in data.rows(path, limit))


def _opened(file: IO[bytes], name: PurePath, archive: Path | None, limit: int | None) -> Iterator[Row]:
    """Rows of an open text file."""
    shown = str(name) if archive is None else f"{archive}/{name}"
    try:
        with io.TextIOWrapper(file, encoding="utf-8") as text:
            if name.suffix == ".txt":
                yield Row({"text": text.read()}, shown, name.stem)
            elif name.suffix == ".jsonl":
                for columns, origin in islice(data.objects(text, shown), limit):
                    yield Row(columns, origin, name.stem)
            else:
                whole = json.load(text)
                listed = whole if isinstance(whole, list) else [whole]
                yield from (Row(row, f"{shown}:{i}", name.stem) for i, row in enumerate(listed[:limit], 1))
    except (ValueError, RecursionError) as error:  # JSON and UTF-8
        raise PromptError(f"{shown} cannot be read as {name.suffix[1:]} in UTF-8: {error}.") from None


def _table(path: Path, limit: int | None) -> Iterator[Row]:
    from longdraft.model.checkpoints import quiet

    load, kind = _library(), _TABLES[path.suffix]
    try:
        with quiet():
            stream = load(kind, data_files=str(path), split="train", streaming=True)
            found = [Row(dict(row), f"{path}:{i}", path.stem) for i, row in enumerate(islice(stream, limit), 1)]
    except Exception as error:  # whatever a bad file sets off in one of several readers
        raise PromptError(f"{path} cannot be read as {kind}: {reason_of(error)}.") from error
    yield from found


def _library() -> Any:
    try:
        from datasets import load_dataset
    except ImportError:
        raise CapabilityError(
            'Data sets by name and parquet files need the datasets library: pip install "longdraft[data]". JSONL files '
            "need nothing: --data FILE.jsonl, or --data gov_report=FILE.jsonl."
        ) from None
    return load_dataset
