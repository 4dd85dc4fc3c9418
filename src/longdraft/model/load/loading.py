"""Loads a model and its tokenizer from a folder, a GGUF file or a Hugging Face id, or the embedded model."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import torch

from longdraft import native
from longdraft.attention import custom_ops
from longdraft.errors import CapabilityError, CheckpointError, ContextError, memory_checked
from longdraft.memory import memory_info
from longdraft.model.gguf.loading import Arithmetic, WeightFormat, int8_unavailable_error, load_gguf
from longdraft.model.gpu import merged_linear
from longdraft.model.layers.experts import store_half_experts
from longdraft.model.load.checkpoints import DType, LoadedModel, Progress, check_gguf, read_checkpoint
from longdraft.model.load.embedded import EMBEDDED_ID, packaged_file
from longdraft.model.load.gc_pause import gc_paused
from longdraft.model.quant import stored_model
from longdraft.model.quant.external import decompress_to
from longdraft.model.quant.packed import reading_packed_layers
from longdraft.options import Option

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@memory_checked()
def load(
    model: str | os.PathLike[str] | None = None,
    *,
    dtype: DType = "auto",
    device: str | torch.device | None = None,
    rope_factor: float | None = None,
    weights: WeightFormat | None = None,
    arithmetic: Arithmetic | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Loads a causal language model, ready to generate: in eval mode, without gradients, on its device.

    model: None for the embedded default; a folder in Hugging Face layout; a ``.gguf`` file; or a hub id.
    dtype: "auto" (float32 on a CPU; on a GPU the checkpoint's, bfloat16 for GGUF files), "float32", "bfloat16",
        "float16" or a torch.dtype.
    device: None takes CUDA if there is a GPU, else MPS, else the CPU.
    rope_factor: YaRN factor (> 1), by which the trained context length is multiplied.
    weights: "stored" keeps matrices as in the file (GGUF's blocks, bfloat16, float16), for float32 on a CPU. "float32"
        unpacks the matrices, with the same results. None is "stored" if our kernels are available. "stored" makes
        Q8_0 of blocks that our kernels do not read (IQ1, IQ2, IQ3, TQ, NVFP4), which rounds them once more. On a GPU
        with Triton, layers of GGUF files keep Q4_0, Q4_K, Q5_K, Q6_K and Q8_0; all else is unpacked to ``dtype``.
    arithmetic: "int8" works as in llama.cpp: layers with weights of 8 bits or fewer round their inputs to 8 bits, in
        blocks of 32, and the KV has 16 bits. "float32" rounds nothing. None is "int8" for GGUF files with such weights
        on a CPU with our kernels, else the dtype's arithmetic.
    progress: called with one line of text before each step that takes seconds.

    Raises CheckpointError (the model cannot be read, or is incomplete), CapabilityError (device, dtype, weights,
    arithmetic or RoPE type unsupported), ContextError (rope_factor), MemoryBudgetError (too little memory)."""
    if model is not None and not isinstance(model, str | os.PathLike):
        raise CheckpointError(f"load takes the name or the folder of a model, not {type(model).__name__}.")
    if weights not in (None, "stored", "float32"):
        raise CapabilityError(f"weights are stored or float32, got {weights!r}.")
    if arithmetic not in (None, "int8", "float32"):
        raise CapabilityError(f"arithmetic is int8 or float32, got {arithmetic!r}.")
    if rope_factor is not None and not Option("rope_factor", float, above=1).allows(rope_factor):
        raise ContextError(f"rope_factor is {rope_factor}: give a finite number above 1, or leave it out.")
    memory_info.check_process_limits()
    target_device = _resolve_device(device)
    loaded_dtype = resolve_dtype(dtype, target_device)
    on_progress = progress or (lambda message: None)
    reads_planes = target_device.type == "cuda" and loaded_dtype != torch.float32 and custom_ops.triton_enabled()
    is_cpu_float32 = target_device.type == "cpu" and loaded_dtype == torch.float32
    if is_cpu_float32:
        native.kernels(progress)  # compiled now, where progress can announce it
    elif weights == "stored" and not reads_planes:
        raise CapabilityError(
            "Stored weights are for float32 on a CPU, and for 16 bits on an NVIDIA GPU with Triton, not for "
            f"{loaded_dtype} on {target_device}: leave weights out."
        )
    if arithmetic is not None and not is_cpu_float32:
        raise CapabilityError(
            f"arithmetic is for float32 on a CPU, not {loaded_dtype} on {target_device}: leave it out."
        )
    name = os.fspath(packaged_file() if model is None else model)
    loaded = _read(name, loaded_dtype, on_progress, rope_factor, weights, arithmetic, reads_planes=reads_planes)
    if model is None:
        # Drafts record their target by name, and the file's path differs between machines.
        loaded.model.config._name_or_path = loaded.model.name_or_path = EMBEDDED_ID
    loaded_model = loaded.model.to(target_device).eval().requires_grad_(False)
    if target_device.type == "cuda":
        merged_linear.join(loaded_model)
    return LoadedModel(loaded_model, loaded.tokenizer)


def load_tensor_parallel(
    model: str | os.PathLike[str] | None, dtype: DType = "auto", progress: Progress | None = None
) -> LoadedModel:
    """Loads this process's shards of a model, under torchrun (:mod:`longdraft.model.tensor_parallel`).

    Raises what :func:`load` raises, and CapabilityError for the embedded model and GGUF files: neither is sharded."""
    name = "" if model is None else os.fspath(model)
    if not name.strip() or Path(name).expanduser().is_file():
        raise CapabilityError(
            "Processes share a model of a folder or a Hugging Face id: give one, or start a single process."
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype, on_progress = resolve_dtype(dtype, device), progress or (lambda message: None)
    loaded = _read(name, dtype, on_progress, weights="float32", tensor_parallel=True)
    return LoadedModel(loaded.model.eval().requires_grad_(False), loaded.tokenizer)


@gc_paused()
def _read(
    name: str,
    dtype: DType,
    on_progress: Progress,
    rope_factor: float | None = None,
    weights: WeightFormat | None = None,
    arithmetic: Arithmetic | None = None,
    tensor_parallel: bool = False,
    reads_planes: bool = False,
) -> LoadedModel:
    """Reads the model ``name``, with the options of :func:`load` and :func:`load_tensor_parallel`.
    ``reads_planes``: it is for a GPU whose kernels read quantised weights."""
    if not name.strip():
        raise CheckpointError("The model's name is empty: give a folder, a .gguf file or a Hugging Face id.")
    path = Path(name).expanduser()
    if path.is_file():
        check_gguf(path)
        keep_planes = reads_planes and weights != "float32"
        return load_gguf(path, dtype, rope_factor, weights, on_progress, arithmetic, keep_planes)
    if path.is_dir():
        on_progress(f"Loading the weights in {path}")
    elif path.suffix == ".gguf" or name[0] in "/.~" or name.count("/") > 1 or "\\" in name:  # no hub id
        raise CheckpointError(f"There is no file or folder {name!r}: check the path.")
    else:
        on_progress(f"{name} is not a folder here: looking on the Hugging Face hub (a first download can take minutes)")
    if reads_planes and weights == "stored":
        raise CapabilityError(f"Stored weights on a GPU are for GGUF files, not {name}: leave weights out.")
    if arithmetic == "int8":
        raise int8_unavailable_error(name, "that is for GGUF files whose weights are stored in 8 bits or fewer")
    keeps_stored = dtype == torch.float32 and bool(native.kernels() if weights is None else weights == "stored")
    with reading_packed_layers() if reads_planes and weights != "float32" else nullcontext():
        loaded = read_checkpoint(name, dtype, rope_factor, keep_dtype=keeps_stored, tensor_parallel=tensor_parallel)
    if isinstance(dtype, torch.dtype):
        decompress_to(loaded.model, dtype)
    if keeps_stored:
        if not getattr(loaded.model, "is_quantized", False):
            store_half_experts(loaded.model)
        stored_model.store_half_weights(loaded.model)
    return loaded


def _resolve_device(device: str | torch.device | None) -> torch.device:
    """Returns the device of :func:`load`. Raises CapabilityError if this machine has no such device."""
    num_devices = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if device is None:
        return torch.device(next((kind for kind, num in num_devices.items() if num), "cpu"))
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise CapabilityError(f"No device is called {device!r}: give cpu, cuda, cuda:N or mps.") from error
    if (parsed.index or 0) >= num_devices.get(parsed.type, 1):
        raise CapabilityError(f"This machine, or this build of torch, has no {parsed}: give device='cpu'.")
    return parsed


def resolve_dtype(dtype: DType, device: torch.device) -> DType:
    """Returns the ``dtype`` argument for transformers' from_pretrained: a torch.dtype, or "auto" on a GPU.
    Raises CapabilityError if longdraft cannot load the dtype."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    parsed = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if not isinstance(parsed, torch.dtype) or not parsed.is_floating_point:
        raise CapabilityError(f"dtype {dtype!r} is not supported: give auto, {', '.join(_DTYPES)}.")
    return parsed
