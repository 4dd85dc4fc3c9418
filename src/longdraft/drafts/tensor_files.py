"""Reads a draft's tensors from safetensors, or from torch files that hold tensors only."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from pathlib import Path

import torch

from longdraft.errors import CheckpointError
from longdraft.files import opened, read_index, reads, regular

WEIGHTS, PICKLED = "model.safetensors", "pytorch_model.bin"
_REMEDY = "It is truncated or damaged: copy the draft again."


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
    with opened(safe, _REMEDY) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def read_some(folder: Path | str, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Some of a folder's tensors, wherever they lie among its safetensors files.

    Raises:
        CheckpointError: missing or truncated.
    """
    safe = Path(folder) / WEIGHTS
    index = safe.with_name(f"{WEIGHTS}.index.json")
    files = read_index(index) if index.is_file() else {}
    found: dict[str, torch.Tensor] = {}
    for path in sorted({files.get(name, safe) for name in names}):
        own = [name for name in names if files.get(name, safe) == path]
        with opened(path, _REMEDY) as file:
            found |= {name: file.get_tensor(name) for name in own}
    return found


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
    if indices:
        return list(read_index(path))
    with opened(path, _REMEDY) as file:
        return list(file.keys())


@reads("The weights", "Get the draft as model.safetensors.")
def _unpickled(path: Path, mapped: bool = False) -> dict[str, torch.Tensor]:
    """Args:
    mapped: leave the numbers in the file, where its format allows that.
    """
    zipped = zipfile.is_zipfile(regular(path))
    if zipped and any(each.compress_type for each in zipfile.ZipFile(path).infolist()):
        raise CheckpointError(f"{path} is compressed, so its size is unknown: get the draft as model.safetensors.")
    # weights_only: a file from anywhere must not run code.
    tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped and zipped)
    known = isinstance(tensors, dict) and all(isinstance(n, str) and _is_plain(t) for n, t in tensors.items())
    if not known:
        raise CheckpointError(f"{path} holds more than tensors by name: get the draft as model.safetensors.")
    return dict(tensors)


def _is_plain(tensor: object) -> bool:
    """True for a tensor whose numbers lie in memory as they are."""
    if not isinstance(tensor, torch.Tensor):
        return False
    return tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized


def _missing(folder: Path | str) -> CheckpointError:
    return CheckpointError(f"{folder} has no {WEIGHTS}: copy the draft again.")
