"""From what a user names (nothing, a folder, a GGUF file, a hub id) to a model and its tokenizer, ready to generate."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

from longdraft import native
from longdraft.errors import CapabilityError, CheckpointError, ContextError
from longdraft.host.checkpoints import (
    DType,
    LoadedModel,
    Progress,
    check_folder,
    check_gguf,
    read_checkpoint,
    read_gguf,
)
from longdraft.host.embedded import EMBEDDED_ID, embedded_folder

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(
    model: str | os.PathLike[str] | None = None,
    *,
    dtype: DType = "auto",
    device: str | torch.device | None = None,
    rope_factor: float | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a causal language model, ready to generate: eval mode, no gradients, on its device.

    model: None for the embedded default; a folder in Hugging Face layout; a ``.gguf`` file; else a hub id.
    dtype: "auto" (float32 on a CPU, the checkpoint's own on a GPU), "float32", "bfloat16", "float16", a torch.dtype.
    device: None takes CUDA where there is one, then MPS, then the CPU.
    rope_factor: YaRN factor (> 1): the context becomes this many times the trained one, in tokens.
    progress: called with one line of text before each step that takes seconds.

    Raises CheckpointError (cannot be read, or incomplete), CapabilityError (device, dtype or RoPE kind),
    ContextError (rope_factor not above 1).
    """
    if rope_factor is not None and not (math.isfinite(rope_factor) and rope_factor > 1):
        raise ContextError(f"rope_factor is {rope_factor}: give a finite number above 1, or leave it out.")
    place = _device(device)
    wanted = _dtype(dtype, place)
    say = progress or (lambda message: None)
    if model is None:
        loaded = _load_folder(embedded_folder(progress), wanted, rope_factor, say)
        # A draft records its target by name, and a path in somebody's cache names nothing.
        loaded.model.config._name_or_path = loaded.model.name_or_path = EMBEDDED_ID
    else:
        loaded = _load_named(os.fspath(model), wanted, rope_factor, say)
    if place.type == "cpu" and loaded.model.dtype == torch.float32:
        native.kernels(progress)  # made now, where it can be said that it takes a moment
    network = loaded.model.to(place).eval().requires_grad_(False)
    return LoadedModel(network, loaded.tokenizer)


def _load_named(name: str, dtype: DType, rope_factor: float | None, say: Progress) -> LoadedModel:
    if not name.strip():
        raise CheckpointError("The model's name is empty: give a folder, a .gguf file or a Hugging Face id.")
    path = Path(name).expanduser()
    if path.is_dir():
        return _load_folder(path, dtype, rope_factor, say)
    if path.is_file():
        check_gguf(path)
        say(f"Reading {path.name}: a GGUF file is unpacked at every start")
        return read_gguf(path, dtype, rope_factor)
    if path.suffix == ".gguf" or name[0] in "/.~" or name.count("/") > 1 or "\\" in name:
        raise CheckpointError(f"There is no file or folder {name!r}: check the path.")
    say(f"{name} is not a folder here: looking on the Hugging Face hub (a first download can take minutes)")
    return read_checkpoint(
        name,
        dtype,
        rope_factor,
        failure=f"{name!r} is not a folder here, and reading it from the Hugging Face hub failed",
        remedy=f"Check that https://huggingface.co/{name} exists and can be reached from this machine "
        "(a gated model needs `hf auth login`), or give a local folder.",
    )


def _load_folder(folder: Path, dtype: DType, rope_factor: float | None, say: Progress) -> LoadedModel:
    safe = check_folder(folder)
    say(f"Loading the weights in {folder}")
    # local_files_only: some tokenizers ask the hub about a folder's origin, and wait where it is unreachable.
    return read_checkpoint(str(folder), dtype, rope_factor, use_safetensors=safe, local_files_only=True)


def _device(device: str | torch.device | None) -> torch.device:
    counts = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if device is None:
        return torch.device(next((kind for kind, count in counts.items() if count), "cpu"))
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise CapabilityError(f"No device is called {device!r}: give cpu, cuda, cuda:N or mps.") from error
    if (place.index or 0) >= counts.get(place.type, 1):
        raise CapabilityError(f"This machine, or this build of torch, has no {place}: give device='cpu'.")
    return place


def _dtype(dtype: DType, device: torch.device) -> DType:
    """What transformers' ``dtype=`` takes."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    chosen = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if chosen is None or not chosen.is_floating_point:
        raise CapabilityError(f"dtype {dtype!r} is not supported: give auto, {', '.join(_DTYPES)}.")
    return chosen
