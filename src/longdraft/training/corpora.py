"""Text on disk: files of many formats, and the papers' corpora by name, as ``pg19:FOLDER``.

A named corpus is a folder as its authors publish it, or as the hub's snapshot lays it out; all files below it that may
hold its text are read, in order of their paths.
"""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from longdraft.errors import CapabilityError, PromptError
from longdraft.files import opened

Row = dict[str, Any]
_SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_SPEAKERS |= {"chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}


def _turns(row: Row) -> Row:
    """ShareGPT's ``conversations`` as ``messages``. What comes before the first user turn, except a system's, goes."""
    turns = [{"role": _SPEAKERS[turn["from"]], "content": turn["value"]} for turn in row["conversations"]]
    while turns and turns[0]["role"] == "assistant":
        turns.pop(0)
    return {"messages": turns}


def _dialogue(row: Row) -> Row:
    """UltraChat's ``data``, in which user and assistant take turns, as ``messages``; the 200k subset has them."""
    if "messages" in row:
        return {"messages": row["messages"]}
    each = zip(row["data"], ("user", "assistant") * len(row["data"]), strict=False)
    return {"messages": [{"role": role, "content": content} for content, role in each]}


def _text(row: Row) -> Row:
    return {"text": row["text"]}


# Name -> what becomes of a row, and what its files' names end with.
_TABLES = (".jsonl", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst", ".parquet")
NAMES: dict[str, tuple[Callable[[Row], Row], tuple[str, ...]]] = {
    "sharegpt": (_turns, (*_TABLES, ".json")),
    "ultrachat": (_dialogue, _TABLES),
    "slimpajama": (_text, _TABLES),
    "long-data-collections": (_text, _TABLES),
    "hidden-states": (dict, (".safetensors",)),
    "pg19": (_text, (*_TABLES, ".txt")),
}


def place_of(source: Path | str) -> tuple[str, Path]:
    """A corpus's name and folder of ``NAME:FOLDER``; of any other source no name, and its path."""
    name, _, folder = str(source).partition(":")
    return (name, Path(folder)) if folder and name in NAMES else ("", Path(source))


def rows(source: Path | str) -> Iterator[Any]:
    """The rows of a file, or of a corpus by name, usually dictionaries; None for a line that is not JSON.

    A row that is none of its corpus is empty, so that it counts as unusable. ``.txt`` is one row.

    Raises:
        PromptError: it is missing or cannot be read, or the folder has no files of the corpus.
        CapabilityError: its format needs a package that is not installed.
    """
    name, place = place_of(source)
    if not name:
        yield from _rows(place)
        return
    convert, endings = NAMES[name]
    files = sorted(path for path in place.rglob("*") if path.name.endswith(endings) and path.is_file())
    if not files:
        raise PromptError(f"{place} has no files of {name} ({', '.join(endings)}): check the path.")
    for row in chain.from_iterable(map(_rows, files)):
        try:
            yield convert(row) if isinstance(row, dict) else row
        except (KeyError, TypeError):
            yield {}


def _rows(path: Path) -> Iterator[Any]:
    try:
        if path.suffix == ".txt":
            yield {"text": path.read_text(encoding="utf-8", errors="replace")}
        elif path.suffix == ".json":
            yield from json.loads(path.read_text(encoding="utf-8"))
        elif path.suffix == ".safetensors":
            with opened(path, "Extract it again.") as file:
                yield {"tokens": file.get_tensor("token_ids").tolist()}
        elif path.suffix == ".parquet":
            for batch in _arrow(path).parquet.ParquetFile(path).iter_batches(256):
                yield from batch.to_pylist()
        else:
            with _opened(path) as lines:
                yield from map(_parsed, filter(str.strip, lines))
    except FileNotFoundError:
        raise PromptError(f"There is no file {path}: check the path.") from None
    except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
        raise PromptError(f"{path} cannot be read ({error}): is it whole, and what its name says?") from None


def _opened(path: Path) -> Any:
    """A text file's lines, unpacked."""
    if path.suffix == ".zst":
        import io

        return io.TextIOWrapper(_arrow(path).input_stream(path, compression="zstd"), "utf-8", "replace")
    openers: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}
    return openers.get(path.suffix, open)(path, "rt", encoding="utf-8", errors="replace")


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _arrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise CapabilityError(f'{path} needs the package pyarrow: pip install "longdraft[data]".') from None
    return pyarrow
