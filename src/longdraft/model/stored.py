"""Models whose weights stay as they are stored: linear layers and the embedding keep the bytes of the file.

There are two arithmetics. In float32 the layers compute the same bits as with unpacked weights: our kernels multiply a
few rows and unpack in registers, and torch multiplies many rows with a matrix that is unpacked for it. In int8 the
input rows are rounded to eight bits (:func:`longdraft.native.stored.rounded_to_int8`) and our kernels multiply
integers, for any number of rows; a prompt's rows meet weights in bfloat16 where a processor has tiles for it.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from longdraft.errors import CapabilityError, CheckpointError
from longdraft.memory import sizes
from longdraft.model.few_rows import MOST, in_halves, is_plain
from longdraft.model.hosting import reading
from longdraft.model.sharded import local, whole
from longdraft.native import Kernels, Stored, kernels
from longdraft.native.boundary import FLOATS, memory_of
from longdraft.native.stored import FORMATS, rounded_blocks, rounded_to_int8

# Attribute of a model for the files that its weights are mapped from.
_FILES = "_longdraft_mapped"
_MAKING = threading.RLock()
_SAMPLED = 64  # weights of a layer that name a model
_SECONDS = 1 << 30  # bytes that it may take two seconds to lay out
_TOGETHER = 4096  # rows of a draft's matrix that are rounded at a time, which bounds the memory for a large head


class StoredWeights(nn.Module):
    """A module with a frozen stored matrix: (out, in) of a layer, or (tokens, size) of an embedding.

    Attributes:
        outs: outputs of each matrix, where several lie one behind the other.
        inside: the module around it saves it.
    """

    data: torch.Tensor
    outs: int | None = None
    inside: bool = False

    def __init__(self, matrix: Stored) -> None:
        super().__init__()
        self.format, self.int8, self._woven = matrix.format, matrix.int8, matrix.woven
        self.register_buffer("data", matrix.data, persistent=False)

    @property
    def matrix(self) -> Stored:
        return Stored(self.data, self.format, self.int8, self._woven)

    def weave(self, own: Kernels, place: torch.Tensor) -> None:
        """Lays the matrix out for int8 arithmetic in so many bytes of memory."""
        self._woven = own.weave(self.matrix, place).woven

    @property
    def weight(self) -> torch.Tensor:
        """The matrix in float32, unpacked in every call."""
        return unpacked(self.matrix)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if not self.inside:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[f"{prefix}weight"] = self.weight


class StoredLinear(StoredWeights):
    """``nn.Linear`` with a stored matrix (out, in) and a float bias (out,)."""

    def __init__(self, matrix: Stored, bias: torch.Tensor | None = None) -> None:
        super().__init__(matrix)
        self.out_features, self.in_features = matrix.shape
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def kernel_weights(self) -> Stored:
        """:func:`longdraft.model.few_rows.weights_of` looks for this attribute."""
        return self.matrix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., in) -> (..., out), in x's dtype."""
        own = kernels() if x.device.type == "cpu" and x.dtype == torch.float32 else None
        if own is not None and (self.int8 or x.numel() <= MOST * x.shape[-1]):
            with torch._C.DisableTorchFunction():  # what the kernel is handed is exact by row as it is
                return own.linear(x, [(self.matrix, self.bias)], prompt=reading())[0]
        rows = rounded_to_int8(x, self.format).to(x.dtype) if self.int8 else x
        return F.linear(rows, self.weight.to(x.dtype), self.bias)


class ArrangedLinear(nn.Module):
    """``nn.Linear`` without a bias that puts inputs and outputs in order, so that no stored block is changed.

    Args:
        parts: matrices (out of a part, in), whose rows lie one behind the other.
        rows: (out,) place in the parts of each row; None: as they are.
        columns: (in,) place in the parts of each column; None: as they are.
    """

    rows: torch.Tensor | None
    columns: torch.Tensor | None
    places: torch.Tensor | None

    def __init__(
        self, parts: Sequence[Stored], rows: torch.Tensor | None = None, columns: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = sum(part.shape[0] for part in parts), parts[0].shape[1]
        products = [StoredLinear(part) for part in parts]
        for product in products:
            product.inside = True
        self.parts = nn.ModuleList(products)
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("columns", columns, persistent=False)
        self.register_buffer("places", None if columns is None else columns.argsort(), persistent=False)

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @property
    def weight(self) -> torch.Tensor:
        """The matrix in float32, unpacked in every call."""
        whole = torch.cat([part.weight for part in self.parts if isinstance(part, StoredLinear)])
        whole = whole if self.rows is None else whole[self.rows]
        return whole if self.columns is None else whole[:, self.columns]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., in) -> (..., out), in x's dtype."""
        if self.places is not None:
            x = x[..., self.places]
        products = [part(x) for part in self.parts]
        out = products[0] if len(products) == 1 else torch.cat(products, dim=-1)
        return out if self.rows is None else out[..., self.rows]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight


class StoredEmbedding(StoredWeights):
    """``nn.Embedding`` with a stored matrix, whose rows are multiplied by ``scale`` (Gemma 3)."""

    like: torch.Tensor

    def __init__(self, matrix: Stored, scale: float = 1.0) -> None:
        super().__init__(matrix)
        self.scale = scale
        self.num_embeddings, self.embedding_dim = matrix.shape
        # Has the dtype that the model is cast to, which is that of the results.
        self.register_buffer("like", torch.empty(0, **FLOATS), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids (...) -> (..., size)."""
        rows = unpacked(self.matrix.rows(ids.flatten()))
        rows = rows.to(self.like.dtype).view(*ids.shape, self.embedding_dim)
        return rows if self.scale == 1.0 else rows * torch.tensor(self.scale, dtype=rows.dtype, device="cpu")


def in_place_of(module: nn.Module, matrix: Stored, bias: torch.Tensor | None = None) -> StoredWeights:
    """A layer or an embedding with a stored matrix, for one of torch's."""
    if isinstance(module, nn.Embedding):
        return StoredEmbedding(matrix, getattr(module, "scalar_embed_scale", 1.0))
    return StoredLinear(matrix, None if bias is None else bias.detach().float())


def put_in(
    module: nn.Module,
    weights: Mapping[str, torch.Tensor | Stored | ArrangedLinear],
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
        elif keeps and isinstance(weight, Stored) and isinstance(own, nn.Linear | nn.Embedding):
            module.set_submodule(path, in_place_of(own, weight.computing(int8), leaves.get("bias")))
        else:
            for leaf, given in leaves.items():
                numbers = unpacked(given) if isinstance(given, Stored) else given
                if leaf in own._parameters:
                    setattr(own, leaf, nn.Parameter(numbers.to(device, dtype), requires_grad=False))
                else:
                    setattr(own, leaf, numbers.to(device, own.get_buffer(leaf).dtype))


def woven(stored: Stored) -> Stored:
    """A stored matrix with a copy for int8 arithmetic, where kernels can make one: :meth:`Kernels.weave`."""
    own = kernels()
    return own.weave(stored) if own is not None and own.weaves(stored) else stored


def unpacked(stored: Stored) -> torch.Tensor:
    """A stored matrix in float32."""
    own = kernels() if stored.data.device.type == "cpu" else None
    return stored.floats() if own is None else own.unpack(stored)


def weight_place(module: nn.Module) -> torch.Tensor:
    """The tensor that holds the weights of a layer or an embedding, for comparison of its storage."""
    return next(pieces(local(module.data if isinstance(module, StoredWeights) else module.weight)))


def weight_shape(module: nn.Module) -> tuple[int, int]:
    """(out, in) of a layer, (tokens, size) of an embedding."""
    if isinstance(module, StoredWeights):
        return module.matrix.shape
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor) and is_plain(weight):
        return weight.shape[0], weight.shape[1]
    # Quantised by another package, perhaps in another shape.
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    return int(module.out_features), int(module.in_features)  # type: ignore[arg-type]


def pieces(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors in memory that a tensor consists of: several of a subclass, in which another package quantised it."""
    names = getattr(weight, "__tensor_flatten__", None)
    if names is None or is_plain(weight):
        yield weight.detach()
    else:
        for inner in (getattr(weight, name) for name in names()[0]):
            yield from pieces(inner) if isinstance(inner, torch.Tensor) else ()


def parameters(model: nn.Module) -> int:
    """The number of a model's weights, stored or not; tied ones count once."""
    blocks = {m.data.data_ptr(): m.matrix.shape for m in model.modules() if isinstance(m, StoredWeights)}
    return sum(p.numel() for p in model.parameters()) + sum(rows * size for rows, size in blocks.values())


def weight_sample(module: nn.Module) -> torch.Tensor:
    """Some evenly spread weights of a module's first parameter, in any storage."""
    if not isinstance(module, StoredWeights):
        # Those of a layer within come after its own.
        flat = next(pieces(whole(next(module.parameters()).detach()))).flatten()
        return flat[:: max(1, flat.numel() // _SAMPLED)]
    matrix = module.matrix
    rows, size = matrix.shape
    places = torch.arange(0, rows * size, max(1, rows * size // _SAMPLED), device=module.data.device)
    return unpacked(matrix.rows(places // size))[torch.arange(len(places), device="cpu"), places % size]


def keep_stored(model: PreTrainedModel) -> PreTrainedModel:
    """Makes a model compute in float32 while its matrices in bfloat16 or float16 stay as they are.

    A model with layers that another package quantised is left alone.
    """
    if getattr(model, "is_quantized", False):
        return model
    known: dict[int, Stored] = {}
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if type(module) in (nn.Linear, nn.Embedding) and in_halves(module.weight):
            stored = known.setdefault(module.weight.data_ptr(), Stored.of(module.weight))
            model.set_submodule(path, in_place_of(module, stored, getattr(module, "bias", None)))
    model.float()
    model.config.dtype = torch.float32
    return mark(model) if known else model


def in_floats(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A model with the same weights, all unpacked, one after the other."""
    with without_memory():
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


def mark(model: PreTrainedModel, *files: Path) -> PreTrainedModel:
    """Makes a model with stored weights refuse to be saved, and remember the files that they are mapped from."""
    vars(model)["save_pretrained"] = _not_saved
    if files:
        vars(model)[_FILES] = [(file.absolute(), _state(file)) for file in files]
    return model


def is_stored(model: nn.Module) -> bool:
    """True if a model has stored weights."""
    return any(isinstance(m, StoredWeights) for m in model.modules())


def is_woven(model: nn.Module) -> bool:
    """True if stored weights are laid out for int8 arithmetic."""
    return any(isinstance(m, StoredWeights) and m.matrix.woven is not None for m in model.modules())


def arithmetic_of(model: nn.Module) -> str:
    """The arithmetic of a model's products: ``"int8"``, or the name of its dtype, such as ``"float32"``."""
    if any(isinstance(m, StoredWeights) and m.int8 for m in model.modules()):
        return "int8"
    dtype = getattr(model, "dtype", None)
    return str(dtype if isinstance(dtype, torch.dtype) else next(model.parameters()).dtype).removeprefix("torch.")


def use_int8(model: nn.Module, on: bool = True) -> None:
    """Switches the layers stored in blocks of 8 bits or fewer to int8 arithmetic, or back to float32."""
    for module in model.modules():
        if isinstance(module, StoredWeights) and not isinstance(module, StoredEmbedding) and module.matrix.in_blocks:
            module.int8 = on


def weave(model: nn.Module, progress: Callable[[str], None]) -> None:
    """Lays matrices out for int8 arithmetic, which reads them faster then. Not where memory is short: it takes as much
    as the matrices themselves, which stay mapped from the file.

    progress is called with a line of text before it takes seconds.
    """
    own = kernels()
    if own is None:
        return
    found = [m for m in model.modules() if isinstance(m, StoredWeights) and m.int8 and own.weaves(m.matrix, m.outs)]
    # Each begins at a line of the cache.
    lengths = [-(-m.data.numel() // 64) * 64 for m in found]
    free = sizes.available_bytes(torch.device("cpu"))
    if free is not None and free < 2 * sum(lengths):
        return
    if sum(lengths) > _SECONDS:
        progress("Laying out the weights for this processor, as at every start")
    for module, place in zip(found, memory_of(sum(lengths)).split(lengths), strict=True):
        module.weave(own, place[: module.data.numel()])


def light(weights: torch.Tensor | Stored, bits: Literal[4, 8] = 8) -> torch.Tensor | Stored:
    """A draft's matrix (out, in) for int8 arithmetic, as a draft need not be exact.

    Args:
        bits: a matrix with more bits than these, and those of scales, is rounded to Q4_0 or Q8_0.

    Returns:
        Floats if a row is no whole number of blocks.
    """
    if isinstance(weights, Stored) and weights.bits <= bits + 1:
        return weights.computing(int8=True)
    if weights.shape[1] % 32:
        return weights.detach().contiguous() if isinstance(weights, torch.Tensor) else unpacked(weights)
    kind: Literal["Q4_0", "Q8_0"] = "Q4_0" if bits == 4 else "Q8_0"
    rows = weights.data.split(_TOGETHER)
    floats = (unpacked(Stored(x, weights.format)) if isinstance(weights, Stored) else x for x in rows)
    return woven(Stored(torch.cat([rounded_blocks(x, kind) for x in floats]), kind, int8=True))


def light_bytes(weights: torch.Tensor | Stored, bits: Literal[4, 8] = 8) -> int:
    """Bytes of what :func:`light` makes, which is laid out for vectors too; 0 if it makes nothing."""
    rows, size = weights.shape
    if size % 32 or (isinstance(weights, Stored) and weights.bits <= bits + 1):
        return 0
    return 2 * rows * size // 32 * FORMATS["Q4_0" if bits == 4 else "Q8_0"][1]


def check_unchanged(model: nn.Module) -> None:
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
def without_memory() -> Iterator[None]:
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
