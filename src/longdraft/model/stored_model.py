"""Models with stored weights as a whole: how layers get them, in which arithmetic they compute, and what is refused."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel

from longdraft.errors import CapabilityError, CheckpointError
from longdraft.huge_pages import take_prefaulted
from longdraft.memory import memory_info
from longdraft.model.skinny_gemm import is_half_matrix
from longdraft.model.stored import ArrangedLinear, StoredEmbedding, StoredWeights, dequantize, stored_module
from longdraft.native import QuantizedMatrix, kernels
from longdraft.native.boundary import allocate_bytes

# Attribute of a model for the files that its weights are mapped from.
_FILES = "_longdraft_mapped"
_MAKING = threading.RLock()
_SECONDS = 1 << 30  # bytes that it may take two seconds to lay out


def load_weights(
    module: nn.Module,
    weights: Mapping[str, torch.Tensor | QuantizedMatrix | ArrangedLinear],
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    int8: bool = False,
) -> None:
    """Gives a module without memory its weights. In float32 on a CPU its layers keep stored ones as they are.

    Args:
        weights: by name.
        int8: stored weights compute in int8 arithmetic.
    """
    parts: dict[str, dict[str, Any]] = {}
    for name, given in weights.items():
        path, _, leaf = name.rpartition(".")
        parts.setdefault(path, {})[leaf] = given
    keeps = torch.device(device).type == "cpu" and dtype == torch.float32
    for path, leaves in parts.items():
        own, weight = module.get_submodule(path), leaves.get("weight")
        if isinstance(weight, ArrangedLinear):
            module.set_submodule(path, weight)
        elif keeps and isinstance(weight, QuantizedMatrix) and isinstance(own, nn.Linear | nn.Embedding):
            module.set_submodule(path, stored_module(own, weight.with_int8(int8), leaves.get("bias")))
        else:
            for leaf, given in leaves.items():
                numbers = dequantize(given) if isinstance(given, QuantizedMatrix) else given
                if leaf in own._parameters:
                    setattr(own, leaf, nn.Parameter(numbers.to(device, dtype), requires_grad=False))
                else:
                    setattr(own, leaf, numbers.to(device, own.get_buffer(leaf).dtype))


def num_parameters(model: nn.Module) -> int:
    """The number of a model's weights, stored or not; tied ones count once."""
    blocks = {m.data.data_ptr(): m.matrix.shape for m in model.modules() if isinstance(m, StoredWeights)}
    return sum(p.numel() for p in model.parameters()) + sum(rows * size for rows, size in blocks.values())


def store_half_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Makes a model compute in float32 while its matrices in bfloat16 or float16 stay as they are.

    A model with layers that another package quantised is left alone.
    """
    if getattr(model, "is_quantized", False):
        return model
    known: dict[int, QuantizedMatrix] = {}
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if type(module) in (nn.Linear, nn.Embedding) and is_half_matrix(module.weight):
            stored = known.setdefault(module.weight.data_ptr(), QuantizedMatrix.from_half(module.weight))
            model.set_submodule(path, stored_module(module, stored, getattr(module, "bias", None)))
    model.float()
    model.config.dtype = torch.float32
    return mark_as_stored(model) if known else model


def dequantize_model(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A model with the same weights, all unpacked, one after the other."""
    with init_empty_weights():
        made = type(model)(copy.deepcopy(model.config))
    weights: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        own: dict[str, Any] = {}
        module._save_to_state_dict(own, f"{path}." if path else "", keep_vars=False)
        weights |= {name: x.to(dtype) if x.is_floating_point() else x for name, x in own.items()}
    made.load_state_dict(weights, assign=True)
    made.config.dtype = dtype
    made.tie_weights()
    made.generation_config = copy.deepcopy(model.generation_config)
    return made.requires_grad_(False).train(model.training)


def mark_as_stored(model: PreTrainedModel, *files: Path) -> PreTrainedModel:
    """Makes a model with stored weights refuse to be saved, and remember the files that they are mapped from."""
    vars(model)["save_pretrained"] = _not_saved
    if files:
        vars(model)[_FILES] = [(file.absolute(), _state(file)) for file in files]
    return model


def has_stored_weights(model: nn.Module) -> bool:
    """True if a model has stored weights."""
    return any(isinstance(m, StoredWeights) for m in model.modules())


def is_repacked(model: nn.Module) -> bool:
    """True if stored weights are laid out for int8 arithmetic."""
    return any(isinstance(m, StoredWeights) and m.matrix.repacked is not None for m in model.modules())


def arithmetic_of(model: nn.Module) -> str:
    """The arithmetic of a model's products: ``"int8"``, or the name of its dtype, such as ``"float32"``."""
    if any(isinstance(m, StoredWeights) and m.int8 for m in model.modules()):
        return "int8"
    dtype = getattr(model, "dtype", None)
    return str(dtype if isinstance(dtype, torch.dtype) else next(model.parameters()).dtype).removeprefix("torch.")


def set_int8(model: nn.Module, on: bool = True) -> None:
    """Switches the layers stored in blocks of 8 bits or fewer to int8 arithmetic, or back to float32."""
    for module in model.modules():
        if isinstance(module, StoredWeights) and not isinstance(module, StoredEmbedding) and module.matrix.is_quantized:
            module.int8 = on


def repack_weights(model: nn.Module, progress: Callable[[str], None]) -> None:
    """Lays matrices out for int8 arithmetic, which reads them faster then. Not where memory is short: it takes as much
    as the matrices themselves, which stay mapped from the file.

    progress is called with a line of text before it takes seconds.
    """
    own = kernels()
    if own is None:
        return
    found = [
        m
        for m in model.modules()
        if isinstance(m, StoredWeights) and m.int8 and own.can_repack(m.matrix, m.rows_per_matrix)
    ]
    # Each begins at a line of the cache.
    lengths = [-(-m.data.numel() // 64) * 64 for m in found]
    size = sum(lengths)
    begun, free = take_prefaulted(size), memory_info.available_bytes(torch.device("cpu"))
    if begun is None and free is not None and free < 2 * size:
        return
    if size > _SECONDS:
        progress("Laying out the weights for this processor, as at every start")
    memory = allocate_bytes(size) if begun is None else torch.frombuffer(begun, dtype=torch.uint8)[:size]
    for module, place in zip(found, memory.split(lengths), strict=True):
        module.repack(own, place[: module.data.numel()])


def check_mapped_files(model: nn.Module) -> None:
    """Raises CheckpointError if a file of a model was written to since its weights were mapped.

    Renaming another file over it changes nothing.
    """
    for file, (place, content) in vars(model).get(_FILES, ()):
        now = _state(file) if file.exists() else (None, None)  # one that is gone stays mapped
        if now[0] == place and now[1] != content:
            raise CheckpointError(
                f"{file} was written to while its weights were in use: load the model again. (To replace a file that "
                "is in use, write another and rename it.)"
            )


@contextmanager
def init_empty_weights() -> Iterator[None]:
    """Inside, modules that this thread makes get parameters without memory, and buffers as usual."""
    thread = threading.get_ident()

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        # A tied parameter comes here twice.
        if parameter is not None and threading.get_ident() == thread and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    with _MAKING:  # two threads that restore each other's function would leave one of ours
        register = nn.Module.register_parameter
        nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


def _state(file: Path) -> tuple[tuple[int, int], tuple[int, int]]:
    """Which file it is, and what is in it as far as the system tells."""
    found = file.stat()
    return (found.st_dev, found.st_ino), (found.st_size, found.st_mtime_ns)


def _not_saved(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise CapabilityError(
        "This model's weights stay as they are stored in its file, so it cannot be saved: load it with "
        'weights="float32" (--weights float32) and save that, or copy the file.'
    )
