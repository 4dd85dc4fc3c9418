"""Reads a draft's tensors from safetensors, or from torch files that hold tensors only."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from longdraft.errors import CheckpointError

WEIGHTS, PICKLED = "model.safetensors", "pytorch_model.bin"


def read(folder: Path | str) -> dict[str, torch.Tensor]:
    """A folder's tensors by name, on the CPU.

    Raises:
        CheckpointError: missing, truncated, or holding more than tensors.
    """
    safe, pickled = Path(folder) / WEIGHTS, Path(folder) / PICKLED
    if pickled.exists() and not safe.exists():
        return _unpickled(pickled)
    if not safe.exists():
        raise _missing(folder)
    try:
        with safe_open(safe, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise _damaged(safe, error) from error


def read_some(folder: Path | str, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Some of a folder's tensors, wherever they lie among its safetensors files.

    Raises:
        CheckpointError: missing or truncated.
    """
    safe = Path(folder) / WEIGHTS
    index = safe.with_name(f"{WEIGHTS}.index.json")
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"] if index.is_file() else {}
        found: dict[str, torch.Tensor] = {}
        for path in sorted({safe.with_name(files.get(name, WEIGHTS)) for name in names}):
            own = [name for name in names if safe.with_name(files.get(name, WEIGHTS)) == path]
            if not path.exists():
                raise CheckpointError(f"{path} is missing: fetch that file again.")
            with safe_open(path, framework="pt") as file:
                found |= {name: file.get_tensor(name) for name in own}
        return found
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise _damaged(index if index.is_file() else safe, error) from error


def is_safe(folder: Path | str) -> bool:
    """True for a folder with safetensors files."""
    safe = Path(folder) / WEIGHTS
    return safe.is_file() or safe.with_name(f"{WEIGHTS}.index.json").is_file()


def names(folder: Path | str) -> Iterable[str]:
    """Names of a folder's tensors, over all its files. The tensors are not read.

    Raises:
        CheckpointError: as :func:`read`.
    """
    safe, pickled = Path(folder) / WEIGHTS, Path(folder) / PICKLED
    indices = [path for file in (safe, pickled) if (path := file.with_name(f"{file.name}.index.json")).is_file()]
    if pickled.exists() and not safe.exists() and not indices:
        return _unpickled(pickled, mapped=True)
    if not safe.exists() and not indices:
        raise _missing(folder)
    path = indices[0] if indices else safe
    try:
        if indices:
            return list(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
        with safe_open(path, framework="pt") as opened:
            return list(opened.keys())
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise _damaged(path, error) from error


def _unpickled(path: Path, mapped: bool = False) -> dict[str, torch.Tensor]:
    """Args:
    mapped: leave the numbers in the file, where its format allows that.
    """
    try:
        # weights_only: a file from anywhere must not run code.
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped and zipfile.is_zipfile(path))
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        said = str(error).splitlines() or [repr(error)]
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) cannot be read as tensors alone: {said[0]} It is truncated or "
            "damaged, or holds code: copy the draft again, or get it as model.safetensors."
        ) from error
    if not isinstance(tensors, dict) or not all(isinstance(t, torch.Tensor) for t in tensors.values()):
        raise CheckpointError(f"{path} holds more than tensors by name: get the draft as model.safetensors.")
    return tensors


def _missing(folder: Path | str) -> CheckpointError:
    return CheckpointError(f"{folder} has no {WEIGHTS}: copy the draft again.")


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} ({path.stat().st_size} bytes) cannot be read: {error}. It is truncated or damaged: copy the draft "
        "again."
    )
