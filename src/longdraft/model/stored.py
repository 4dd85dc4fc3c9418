"""A model whose weights stay as they are stored: linear layers and the embedding keep the bytes of the file.

Two arithmetics. In float32 the layers compute what the unpacked weights would give, to the bit: a few rows by our
kernels, which unpack in registers; many by torch's product with a matrix that is unpacked for it. In int8 the rows that
meet a matrix are rounded to eight bits in blocks of 32 and the products are of whole numbers, by our kernels for any
number of rows. The model is transformers' own otherwise.
"""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from longdraft.errors import CapabilityError, CheckpointError
from longdraft.model.few_rows import MOST, in_halves
from longdraft.model.sharded import local, whole
from longdraft.native import Kernels, Stored, kernels
from longdraft.native.stored import rounded_to_int8

# What a model carries the file under that its weights are mapped from.
_FILE = "_longdraft_mapped"
_MAKING = threading.RLock()


class StoredWeights(nn.Module):
    """A module whose weights are a stored matrix, frozen.

    Args:
        matrix: (out, in) of a layer, (tokens, size) of an embedding.

    Attributes:
        weight: float32, unpacked whenever it is asked for.
    """

    data: torch.Tensor

    def __init__(self, matrix: Stored) -> None:
        super().__init__()
        self.format, self.int8 = matrix.format, matrix.int8
        self.register_buffer("data", matrix.data, persistent=False)

    @property
    def matrix(self) -> Stored:
        return Stored(self.data, self.format, self.int8)

    @property
    def weight(self) -> torch.Tensor:
        return unpacked(self.matrix)

    def extra_repr(self) -> str:
        return f"{self.matrix.shape}, format={self.format}{', int8' if self.int8 else ''}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight


class StoredLinear(StoredWeights):
    """``nn.Linear`` of stored weights.

    Args:
        matrix: (out, in). bias: (out,) float.
    """

    def __init__(self, matrix: Stored, bias: torch.Tensor | None = None) -> None:
        super().__init__(matrix)
        self.out_features, self.in_features = matrix.shape
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def kernel_weights(self) -> Stored:
        """By this name :func:`longdraft.model.few_rows.weights_of` knows a linear layer."""
        return self.matrix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., in) -> (..., out), in x's dtype."""
        own = _kernels_for(x)
        if own is not None and (self.int8 or x.numel() <= MOST * x.shape[-1]):
            return own.linear(x, [(self.matrix, self.bias)])[0]
        rows = rounded_to_int8(x).to(x.dtype) if self.int8 else x
        return F.linear(rows, self.weight.to(x.dtype), self.bias)


class StoredEmbedding(StoredWeights):
    """``nn.Embedding`` of stored weights."""

    like: torch.Tensor

    def __init__(self, matrix: Stored) -> None:
        super().__init__(matrix)
        self.num_embeddings, self.embedding_dim = matrix.shape
        # Of the dtype that the model was cast to, which is what comes out.
        self.register_buffer("like", torch.empty(0), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids (...) -> (..., size)."""
        rows = unpacked(self.matrix.rows(ids.flatten()))
        return rows.to(self.like.dtype).view(*ids.shape, self.embedding_dim)


def unpacked(stored: Stored) -> torch.Tensor:
    """(out, in) float32."""
    own = kernels() if stored.data.device.type == "cpu" else None
    return stored.floats() if own is None else own.unpack(stored)


def has_weights(module: nn.Module) -> bool:
    """Whether a module has weights of its own."""
    return isinstance(module, StoredWeights) or any(True for _ in module.parameters(recurse=False))


def weight_place(module: nn.Module) -> torch.Tensor:
    """The tensor in memory that a layer's or an embedding's weights are: to see where it lies, not what it says."""
    found = module.data if isinstance(module, StoredWeights) else module.weight
    assert isinstance(found, torch.Tensor)
    return local(found)


def weight_shape(module: nn.Module) -> tuple[int, int]:
    """(out, in) of a layer, (tokens, size) of an embedding."""
    if isinstance(module, StoredWeights):
        return module.matrix.shape
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    rows, size = weight.shape
    return rows, size


def parameters(model: nn.Module) -> int:
    """How many weights a model has, tied ones once, however they are stored."""
    blocks = {m.data.data_ptr(): m.matrix.shape for m in model.modules() if isinstance(m, StoredWeights)}
    return sum(p.numel() for p in model.parameters()) + sum(rows * size for rows, size in blocks.values())


def weight_sample(module: nn.Module, most: int = 64) -> torch.Tensor:
    """Some of a module's first weights, evenly spread, the same however they are stored."""
    if not isinstance(module, StoredWeights):
        flat = whole(next(module.parameters(recurse=False)).detach()).flatten()
        return flat[:: max(1, flat.numel() // most)]
    matrix = module.matrix
    rows, size = matrix.shape
    places = torch.arange(0, rows * size, max(1, rows * size // most), device=module.data.device)
    return unpacked(matrix.rows(places // size))[torch.arange(len(places)), places % size]


def keep_stored(model: PreTrainedModel) -> PreTrainedModel:
    """Makes a model compute in float32 while its matrices in bfloat16 or float16, if it has any, stay as they are."""
    known: dict[int, Stored] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) not in (nn.Linear, nn.Embedding) or not in_halves(child.weight):
                continue
            stored = known.setdefault(child.weight.data_ptr(), Stored.of(child.weight))
            if isinstance(child, nn.Linear):
                bias = None if child.bias is None else child.bias.detach().float()
                setattr(parent, name, StoredLinear(stored, bias))
            else:
                setattr(parent, name, StoredEmbedding(stored))
    model.float()
    model.config.dtype = torch.float32
    return mark(model) if known else model


def in_float32(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the same weights, all unpacked."""
    with without_memory():
        made = type(model)(copy.deepcopy(model.config))
    made.load_state_dict(model.state_dict(), assign=True)
    made.tie_weights()
    made.generation_config = copy.deepcopy(model.generation_config)
    return made.requires_grad_(False).train(model.training)


def mark(model: PreTrainedModel, file: Path | None = None) -> PreTrainedModel:
    """Says of a model that its weights are stored ones: it refuses to be saved.

    Args:
        file: that they are mapped from; see :func:`check_unchanged`.
    """
    vars(model)["save_pretrained"] = _not_saved
    if file is not None:
        vars(model)[_FILE] = _Mapped(file)
    return model


def is_stored(model: nn.Module) -> bool:
    """Whether some of its weights stay as they are stored."""
    return any(isinstance(m, StoredWeights) for m in model.modules())


def arithmetic_of(model: nn.Module) -> str:
    """The arithmetic of a model's products: ``"int8"``, or the dtype it computes in, such as ``"float32"``."""
    if any(isinstance(m, StoredLinear) and m.int8 for m in model.modules()):
        return "int8"
    dtype = getattr(model, "dtype", None)
    return str(dtype if isinstance(dtype, torch.dtype) else next(model.parameters()).dtype).removeprefix("torch.")


def use_int8(model: nn.Module, on: bool = True) -> bool:
    """Switches the layers stored in blocks of 8 bits or fewer to int8 arithmetic, or back to float32.

    Returns:
        Whether there are any.
    """
    layers = [m for m in model.modules() if isinstance(m, StoredLinear) and m.matrix.in_blocks]
    for layer in layers:
        layer.int8 = on
    return bool(layers)


def check_unchanged(model: nn.Module) -> None:
    """Refuses a model whose file was written to since it was mapped.

    Raises:
        CheckpointError: naming the file.
    """
    if (mapped := vars(model).get(_FILE)) is not None:
        mapped.check()


@contextmanager
def without_memory() -> Iterator[None]:
    """Parameters of modules that this thread makes inside have no values; buffers have theirs."""
    own = threading.get_ident()

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        # One that is tied to another is on its second way here.
        if parameter is not None and threading.get_ident() == own and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    with _MAKING:  # two that put each other's back would leave one there
        register = nn.Module.register_parameter
        nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


class _Mapped:
    """A file that weights are mapped from. It stays open: one that is renamed over it changes nothing."""

    def __init__(self, file: Path) -> None:
        self._path = file
        self._open = os.open(file, os.O_RDONLY)
        weakref.finalize(self, os.close, self._open)
        self._was = self._look()

    def check(self) -> None:
        if self._look() != self._was:
            raise CheckpointError(
                f"{self._path} was written to while its weights were in use: load the model again. (To replace a file "
                "that is in use, write another and rename it.)"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> _Mapped:
        return self  # a copy of the model reads the same file

    def _look(self) -> tuple[int, int]:
        stat = os.fstat(self._open)
        return stat.st_size, stat.st_mtime_ns


def _kernels_for(x: torch.Tensor) -> Kernels | None:
    return kernels() if x.device.type == "cpu" and x.dtype == torch.float32 else None


def _not_saved(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise CapabilityError(
        "This model's weights stay as they are stored in its file, so it cannot be saved: load it with "
        'weights="float32" (--weights float32) and save that, or copy the file.'
    )
