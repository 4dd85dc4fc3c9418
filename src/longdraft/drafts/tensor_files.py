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
    Raises CheckpointError if files are missing or truncated, or hold more than tensors."""
    if not has_safetensors(folder):
        return _read_pickled(Path(folder) / PICKLED)
    paths, tensors = _find_files(folder), dict[str, torch.Tensor]()
    paths = paths if names is None else {name: paths[name] for name in names}
    for path in sorted(set(paths.values())):
        with open_safetensors(path, _REMEDY) as file:
            tensors |= {name: file.get_tensor(name) for name in paths if paths[name] == path}
    return tensors


def has_safetensors(folder: Path | str) -> bool:
    """True if the folder has safetensors files."""
    return any((Path(folder) / name).exists() for name in (WEIGHTS, f"{WEIGHTS}.index.json"))


def names(folder: Path | str) -> Iterable[str]:
    """Returns the names of a folder's tensors, without reading the tensors. Raises the errors of :func:`read`."""
    index = Path(folder) / f"{PICKLED}.index.json"
    if has_safetensors(folder):
        return _find_files(folder)
    return read_weight_index(index) if index.is_file() else _read_pickled(Path(folder) / PICKLED, mapped=True)


def select_names(folder: Path | str, select: Callable[[Iterable[str]], dict[str, str]]) -> dict[str, str]:
    """Applies ``select`` to a folder's tensor names. Returns {} if safetensors files are missing or damaged."""
    try:
        return select(names(folder)) if has_safetensors(folder) else {}
    except CheckpointError:
        return {}


def _find_files(folder: Path | str) -> dict[str, Path]:
    """Returns the safetensors file of each tensor, by the tensor's name."""
    single_file = Path(folder) / WEIGHTS
    index = single_file.with_name(f"{WEIGHTS}.index.json")
    if index.is_file():
        return read_weight_index(index)
    with open_safetensors(single_file, _REMEDY) as file:
        return dict.fromkeys(file.keys(), single_file)


@reports_file_errors("The weights", "Get the draft as model.safetensors.")
def _read_pickled(path: Path, mapped: bool = False) -> dict[str, torch.Tensor]:
    """Reads the tensors of a pickled file. ``mapped``: map the file into memory, if its format allows that."""
    if not path.exists():
        raise CheckpointError(f"{path.parent} has no {WEIGHTS}: copy the draft again.")
    zipped = zipfile.is_zipfile(require_regular(path))
    if zipped and any(entry.compress_type for entry in zipfile.ZipFile(path).infolist()):
        raise CheckpointError(f"{path} is compressed, so its size is unknown: get the draft as {WEIGHTS}.")
    # weights_only: an untrusted file must not run code.
    tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped and zipped)
    if not isinstance(tensors, dict) or not all(isinstance(n, str) and _is_plain(t) for n, t in tensors.items()):
        raise CheckpointError(f"{path} holds more than named tensors: get the draft as {WEIGHTS}.")
    return dict(tensors)


def _is_plain(tensor: object) -> bool:
    """True for a dense, unquantized tensor on the CPU."""
    if not isinstance(tensor, torch.Tensor):
        return False
    return tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
