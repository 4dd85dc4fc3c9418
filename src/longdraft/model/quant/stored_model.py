"""Loads weights into models, some as stored weights (:mod:`.stored`), and sets the arithmetic."""

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

from longdraft.errors import CapabilityError
from longdraft.huge_pages import take_prefaulted
from longdraft.memory import memory_info
from longdraft.model.fingerprint import record_mapped_files
from longdraft.model.layers.skinny_gemm import is_half_matrix
from longdraft.model.quant.planes import PlanesLinear, planes_of
from longdraft.model.quant.stored import (
    ArrangedLinear,
    StoredEmbedding,
    StoredWeights,
    dequantize,
    layer_matrix,
    stored_module,
)
from longdraft.native import QuantizedMatrix, kernels
from longdraft.native.boundary import allocate_bytes

# Held while nn.Module.register_parameter is replaced, or two threads might restore each other's function.
_REGISTER_LOCK = threading.RLock()
_SLOW_REPACK_BYTES = 1 << 30  # repacking more takes seconds


def load_weights(
    module: nn.Module,
    weights: Mapping[str, torch.Tensor | QuantizedMatrix | ArrangedLinear],
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    int8: bool = False,
) -> None:
    """Loads weights into a module on the meta device. In float32 on a CPU, quantised matrices stay quantised.

    Args:
        module: the module, whose submodules may be replaced.
        weights: name of a parameter or buffer -> its values.
        device: device of the loaded parameters.
        dtype: dtype of the loaded parameters.
        int8: True lets layers with quantised weights compute in int8 arithmetic."""
    tensors_by_path: dict[str, dict[str, Any]] = {}  # path of a submodule -> its tensors by name
    for full_name, value in weights.items():
        path, _, name = full_name.rpartition(".")
        tensors_by_path.setdefault(path, {})[name] = value
    keep_stored = torch.device(device).type == "cpu" and dtype == torch.float32
    for path, tensors in tensors_by_path.items():
        submodule, weight = module.get_submodule(path), tensors.get("weight")
        if isinstance(weight, ArrangedLinear):
            module.set_submodule(path, weight)
        elif keep_stored and isinstance(weight, QuantizedMatrix) and isinstance(submodule, nn.Linear | nn.Embedding):
            module.set_submodule(path, stored_module(submodule, weight.with_int8(int8), tensors.get("bias")))
        else:
            for name, value in tensors.items():
                values = dequantize(value) if isinstance(value, QuantizedMatrix) else value
                if name in submodule._parameters:
                    setattr(submodule, name, nn.Parameter(values.to(device, dtype), requires_grad=False))
                else:
                    setattr(submodule, name, values.to(device, submodule.get_buffer(name).dtype))


def num_parameters(model: nn.Module) -> int:
    """Returns the number of a model's weights, with stored weights. Tied weights count once."""
    stored = {m.data.data_ptr(): m.matrix.shape for m in model.modules() if isinstance(m, StoredWeights)}
    return sum(p.numel() for p in model.parameters()) + sum(rows * columns for rows, columns in stored.values())


def store_half_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Makes a model compute in float32 while its matrices stay in bfloat16 or float16.
    Does not change a model that another package quantised. Returns the model."""
    if getattr(model, "is_quantized", False):
        return model
    tied: dict[int, QuantizedMatrix] = {}  # address of a weight -> its matrix, which tied modules share
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if type(module) in (nn.Linear, nn.Embedding) and is_half_matrix(module.weight):
            stored = tied.setdefault(module.weight.data_ptr(), QuantizedMatrix.from_half(module.weight))
            model.set_submodule(path, stored_module(module, stored, getattr(module, "bias", None)))
    model.float()
    model.config.dtype = torch.float32
    return mark_as_stored(model) if tied else model


def dequantize_model(model: PreTrainedModel, dtype: torch.dtype, keep_planes: bool = False) -> PreTrainedModel:
    """Returns a copy of a model with all weights dequantised to ``dtype``. With ``keep_planes``, linear layers keep
    quantised weights for a GPU (:mod:`.planes`). A head that is tied to the embedding gets planes of its own, as the
    embedding is dequantised."""
    with init_empty_weights():
        copied = type(model)(copy.deepcopy(model.config))
    weights: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        state: dict[str, Any] = {}
        matrix = layer_matrix(module) if keep_planes else None
        if matrix is not None and (planes := planes_of(matrix)) is not None:
            bias = getattr(module, "bias", None)
            layer = PlanesLinear(planes, None if bias is None else bias.to(dtype))
            copied.set_submodule(path, layer)
            module = layer
        module._save_to_state_dict(state, f"{path}." if path else "", keep_vars=False)
        weights |= {name: x.to(dtype) if x.is_floating_point() else x for name, x in state.items()}
    copied.load_state_dict(weights, assign=True)
    copied.config.dtype = dtype
    if not isinstance(copied.get_output_embeddings(), PlanesLinear):
        copied.tie_weights()
    copied.generation_config = copy.deepcopy(model.generation_config)
    copied.requires_grad_(False).train(model.training)
    return mark_as_stored(copied) if has_stored_weights(copied) else copied


def mark_as_stored(model: PreTrainedModel, *files: Path) -> PreTrainedModel:
    """Makes a model's ``save_pretrained`` raise, and records the files that its weights are mapped from."""
    vars(model)["save_pretrained"] = _not_saved
    record_mapped_files(model, files)
    return model


def has_stored_weights(model: nn.Module) -> bool:
    """True if a model has layers or embeddings with stored weights."""
    return any(isinstance(m, StoredWeights | PlanesLinear) for m in model.modules())


def is_repacked(model: nn.Module) -> bool:
    """True if a model has stored weights that are repacked for int8 arithmetic."""
    return any(isinstance(m, StoredWeights) and m.matrix.repacked is not None for m in model.modules())


def arithmetic_of(model: nn.Module) -> str:
    """Returns the arithmetic of a model's matrix products: "int8", or the name of a dtype, such as "float32"."""
    if any(isinstance(m, StoredWeights) and m.int8 for m in model.modules()):
        return "int8"
    dtype = getattr(model, "dtype", None)
    return str(dtype if isinstance(dtype, torch.dtype) else next(model.parameters()).dtype).removeprefix("torch.")


def set_int8(model: nn.Module, on: bool = True) -> None:
    """Switches layers whose weights are in quant blocks (8 bits or fewer) to int8 arithmetic, or back to float32."""
    for module in model.modules():
        if isinstance(module, StoredWeights) and not isinstance(module, StoredEmbedding) and module.matrix.is_quantized:
            module.int8 = on


def repack_weights(model: nn.Module, progress: Callable[[str], None]) -> None:
    """Makes repacked copies of matrices, which int8 arithmetic reads faster. Does nothing if memory is short.
    The copies are as large as the matrices, which stay mapped from the file. ``progress`` gets a line of text before a
    slow repacking."""
    cpu_kernels = kernels()
    if cpu_kernels is None:
        return
    modules = [m for m in model.modules() if isinstance(m, StoredWeights) and m.int8]
    modules = [m for m in modules if cpu_kernels.can_repack(m.matrix, m.rows_per_matrix)]
    # Each copy begins at a multiple of 64 bytes, a cache line.
    lengths = [-(-m.data.numel() // 64) * 64 for m in modules]
    size = sum(lengths)
    prefaulted, free = take_prefaulted(size), memory_info.available_bytes(torch.device("cpu"))
    if prefaulted is None and free is not None and free < 2 * size:  # copies may take half of the free memory
        return
    if size > _SLOW_REPACK_BYTES:
        progress("Repacking the weights for this processor, as at every start")
    memory = allocate_bytes(size) if prefaulted is None else torch.frombuffer(prefaulted, dtype=torch.uint8)[:size]
    for module, part in zip(modules, memory.split(lengths), strict=True):
        module.repack(cpu_kernels, part[: module.data.numel()])


@contextmanager
def init_empty_weights() -> Iterator[None]:
    """Inside the ``with``, puts parameters, but not buffers, of modules that this thread makes on the meta device."""
    thread = threading.get_ident()

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        # A tied parameter is registered twice, the second time already on the meta device.
        if parameter is not None and threading.get_ident() == thread and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    with _REGISTER_LOCK:
        register = nn.Module.register_parameter
        nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


def _not_saved(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise CapabilityError(
        "This model's weights are used in the format of its file, so it cannot be saved: load it with "
        'weights="float32" (--weights float32) and save that, or copy the file.'
    )
