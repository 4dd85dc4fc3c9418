"""What folders of features on disk have in common: an index that says whose they are, files that appear whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from longdraft.errors import CheckpointError, LongdraftError
from longdraft.training.branches import Said
from longdraft.training.features import Features

INDEX = "index.json"


def check_index(folder: Path, index: dict[str, Any], of: str) -> None:
    """Makes a folder, or sees that one that is there holds the same.

    Args:
        index: what its index says or will say, as JSON gives it back. of: what it holds if that differs.

    Raises:
        CheckpointError: it differs, or the folder or its index cannot be used.
    """
    path = folder / INDEX
    try:
        folder.mkdir(parents=True, exist_ok=True)
        same = not path.exists() or json.loads(path.read_text(encoding="utf-8")) == index
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}. Delete the folder, or name another.") from error
    if not same:
        raise foreign(folder, of)


def foreign(folder: Path, of: str) -> CheckpointError:
    """What to raise where a folder holds something else."""
    return CheckpointError(f"{folder} holds features of {of}. Delete it, or name another folder.")


def write_index(folder: Path, index: dict[str, Any]) -> None:
    """Raises CheckpointError where it cannot be written."""
    _replace(folder / INDEX, lambda part: part.write_text(json.dumps(index), encoding="utf-8"))


def write(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """A safetensors file, whole or not at all.

    Raises:
        CheckpointError: it cannot be written.
    """
    tensors = {name: t.contiguous().cpu() for name, t in tensors.items()}
    _replace(path, lambda part: save_file(tensors, part, metadata))


def laid_out(parts: Sequence[Said] | Sequence[Features]) -> dict[str, torch.Tensor]:
    """What a file holds of texts laid end to end: ``tokens``, likeliest tokens (``ids``, ``lps``), and their rows."""
    found = {
        "tokens": torch.cat([p.tokens for p in parts]).int(),
        "ids": torch.cat([p.top_ids for p in parts]).int(),
        "lps": torch.cat([p.top_log_probs for p in parts]).half(),
    }
    return found | {name: torch.cat([p.rows[name] for p in parts]) for name in parts[0].rows}


@contextmanager
def readable(path: Path, advice: str) -> Iterator[None]:
    """Raises CheckpointError, with advice, where what is done in it fails because a file is missing or damaged."""
    try:
        yield
    except LongdraftError:
        raise
    except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. {advice}") from error


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Writes a file beside its place and moves it there."""
    part = path.with_suffix(".part")
    try:
        write(part)
        part.replace(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"Could not write {path}: {error}. What is there already is kept.") from error
    finally:
        part.unlink(missing_ok=True)
