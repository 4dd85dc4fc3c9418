"""Reads tensors of a folder from safetensors, or from pickled files that hold only tensors."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from longdraft.errors import CheckpointError
from longdraft.files import open_safetensors, read_weight_index, reports_file_errors, require_regular

WEIGHTS, PICKLED = "model.safetensors", "pytorch_model.bin"
_REMEDY = "It is truncated or damaged: copy the draft again."


def read(folder: Path | str, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """Reads the tensors of ``names`` from a folder, on the CPU; None: all tensors.

    Raises:
        CheckpointError: files that are missing or truncated, or that hold more than tensors.
    """
    if not has_safetensors(folder):
        return _read_pickled(Path(folder) / PICKLED)
    files, tensors = _files(folder), dict[str, torch.Tensor]()
    files = files if names is None else {name: files[name] for name in names}
    for path in sorted(set(files.values())):
        with open_safetensors(path, _REMEDY) as file:
            tensors |= {name: file.get_tensor(name) for name, its_file in files.items() if its_file == path}
    return tensors


def has_safetensors(folder: Path | str) -> bool:
    """True for a folder with safetensors files."""
    return any((Path(folder) / name).exists() for name in (WEIGHTS, f"{WEIGHTS}.index.json"))


def names(folder: Path | str) -> Iterable[str]:
    """Names of the tensors in all files of a folder, without reading the tensors. Raises the errors of :func:`read`."""
    index = Path(folder) / f"{PICKLED}.index.json"
    if has_safetensors(folder):
        return _files(folder)
    return read_weight_index(index) if index.is_file() else _read_pickled(Path(folder) / PICKLED, mapped=True)


def select_names(folder: Path | str, select: Callable[[Iterable[str]], dict[str, str]]) -> dict[str, str]:
    """Applies ``select`` to a folder's tensor names. Returns {} if safetensors files are missing or damaged."""
    try:
        return select(names(folder)) if has_safetensors(folder) else {}
    except CheckpointError:
        return {}


def _files(folder: Path | str) -> dict[str, Path]:
    """Name of a tensor -> its safetensors file."""
    safe = Path(folder) / WEIGHTS
    index = safe.with_name(f"{WEIGHTS}.index.json")
    if index.is_file():
        return read_weight_index(index)
    with open_safetensors(safe, _REMEDY) as file:
        return dict.fromkeys(file.keys(), safe)


@reports_file_errors("The weights", "Get the draft as model.safetensors.")
def _read_pickled(path: Path, mapped: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of a pickled file by name. ``mapped``: map the file into memory, if its format allows that."""
    if not path.exists():
        raise CheckpointError(f"{path.parent} has no {WEIGHTS}: copy the draft again.")
    zipped = zipfile.is_zipfile(require_regular(path))
    if zipped and any(entry.compress_type for entry in zipfile.ZipFile(path).infolist()):
        raise CheckpointError(f"{path} is compressed, so its size is unknown: get the draft as model.safetensors.")
    # weights_only: an untrusted file must not run code.
    tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped and zipped)
    if not isinstance(tensors, dict) or not all(isinstance(n, str) and _is_plain(t) for n, t in tensors.items()):
        raise CheckpointError(f"{path} holds more than named tensors: get the draft as model.safetensors.")
    return dict(tensors)


def _is_plain(tensor: object) -> bool:
    """True for a dense, unquantized tensor on the CPU."""
    if not isinstance(tensor, torch.Tensor):
        return False
    return tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
