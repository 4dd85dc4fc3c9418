"""Folders of features: an index that says what their files were computed from, and files that appear whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from longdraft.errors import CheckpointError
from longdraft.files import TEXT, naming, read_json, regular
from longdraft.training.features import Features

INDEX = "index.json"


def as_json(index: dict[str, Any]) -> Any:
    """An index as it is read back from a file."""
    return json.loads(json.dumps(index))


def check_index(folder: Path, index: dict[str, Any], other: str) -> None:
    """Makes the folder. Raises CheckpointError if it has another index, as a folder of ``other`` would."""
    path = folder / INDEX
    with readable(path, "Delete the folder, or name another."):
        folder.mkdir(parents=True, exist_ok=True)
        same = not path.exists() or read_json(path, TEXT) == as_json(index)
    if not same:
        raise refused(folder, other)


def refused(folder: Path, other: str) -> CheckpointError:
    return CheckpointError(f"{folder} holds features of {other}. Delete it, or name another folder.")


def write_index(folder: Path, index: dict[str, Any]) -> None:
    """Raises CheckpointError if the index cannot be written."""
    _write_whole(folder / INDEX, lambda part: part.write_text(json.dumps(index), encoding="utf-8"))


def write(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file. Raises CheckpointError if it cannot be written."""
    tensors = {name: t.contiguous().cpu() for name, t in tensors.items()}
    _write_whole(path, lambda part: save_file(tensors, part, metadata))


def _write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    part = path.with_suffix(".part")
    try:
        write(part)
        part.replace(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"Could not write {path}: {error}. What is there already is kept.") from error
    finally:
        part.unlink(missing_ok=True)


def joined(texts: Sequence[Features]) -> dict[str, torch.Tensor]:
    """The tensors of texts laid end to end: ``tokens``, likeliest tokens (``ids``), and ``rows`` by name."""
    tensors = {
        "tokens": torch.cat([text.tokens for text in texts]).int(),
        "ids": torch.cat([text.likeliest for text in texts]).int(),
    }
    return tensors | {name: torch.cat([text.rows[name] for text in texts]) for name in texts[0].rows}


@contextmanager
def readable(path: Path, advice: str) -> Iterator[None]:
    """Turns errors of reading a file into a CheckpointError that ends with ``advice``."""
    with naming(regular(path), f"{path} cannot be read", advice):
        yield
