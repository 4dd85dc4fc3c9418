"""Linear layers and embeddings with stored weights: weights that stay as in the model's file, quantised or in 16 bits.

Layers compute in one of two arithmetics. In float32 results have the same bits as with dequantised weights: for a few
tokens our kernels dequantise in registers, and for many tokens torch multiplies with a dequantised copy. In int8 the
inputs are quantised too (:func:`longdraft.native.quantized_matrix.fake_quantize_int8`), and our kernels multiply
integers. If the CPU has AMX tiles, prefill in int8 arithmetic multiplies in bfloat16 tiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from longdraft.model.hosting import in_prefill
from longdraft.model.layers.skinny_gemm import MAX_SKINNY_ROWS, is_plain_tensor
from longdraft.model.quant import planes
from longdraft.model.quant.planes import Planes, PlanesLinear
from longdraft.model.tensor_parallel import full_tensor, local_tensor
from longdraft.native import Kernels, QuantizedMatrix, kernels
from longdraft.native.boundary import CPU_FLOAT32
from longdraft.native.quantized_matrix import QUANT_SIZES, fake_quantize_int8, quantize_blocks

_NUM_SAMPLES = 64  # number of a module's weights in the digest of a target's description
_QUANTIZE_CHUNK_ROWS = 256  # number of rows that are quantised at a time: their numbers fit into a cache
_QUANT_BLOCK = 32  # number of weights in a block of Q4_0 and Q8_0


class StoredWeights(nn.Module):
    """A module with a frozen stored matrix: (out, in) for a layer, or (vocabulary, size) for an embedding.

    Attributes:
        data: the matrix's bytes, in ``format``.
        format: format of the weights, by GGUF's name.
        int8: True for int8 arithmetic.
        rows_per_matrix: number of rows for each expert, if the matrices of several experts are stacked; else None.
        saved_by_parent: True if the parent module's state dict contains the weights, so this module's omits them."""

    data: torch.Tensor
    rows_per_matrix: int | None = None
    saved_by_parent: bool = False

    def __init__(self, matrix: QuantizedMatrix) -> None:
        super().__init__()
        self.format, self.int8, self._repacked = matrix.format, matrix.int8, matrix.repacked
        self.register_buffer("data", matrix.data, persistent=False)

    @property
    def matrix(self) -> QuantizedMatrix:
        """The stored matrix, with its repacked copy."""
        return QuantizedMatrix(self.data, self.format, self.int8, self._repacked)

    def repack(self, cpu_kernels: Kernels, memory: torch.Tensor) -> None:
        """Writes a copy of the matrix, repacked for int8 arithmetic, into ``memory``."""
        self._repacked = cpu_kernels.repack(self.matrix, memory).repacked

    @property
    def weight(self) -> torch.Tensor:
        """The matrix in float32, dequantised at each access."""
        return dequantize(self.matrix)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if not self.saved_by_parent:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[f"{prefix}weight"] = self.weight


class StoredLinear(StoredWeights):
    """``nn.Linear`` with a stored matrix (out, in) and a float bias (out,)."""

    def __init__(self, matrix: QuantizedMatrix, bias: torch.Tensor | None = None) -> None:
        super().__init__(matrix)
        self.out_features, self.in_features = matrix.shape
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def kernel_weights(self) -> QuantizedMatrix:
        """The matrix, for :func:`longdraft.model.layers.skinny_gemm.kernel_weights_of`."""
        return self.matrix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes x (..., in) -> (..., out), in x's dtype."""
        cpu_kernels = kernels() if x.device.type == "cpu" and x.dtype == torch.float32 else None
        if cpu_kernels is not None and (self.int8 or x.numel() <= MAX_SKINNY_ROWS * x.shape[-1]):
            with torch._C.DisableTorchFunction():  # the kernel is batch invariant already
                return cpu_kernels.linear(x, [(self.matrix, self.bias)], prefill=in_prefill())[0]
        inputs = fake_quantize_int8(x, self.format).to(x.dtype) if self.int8 else x
        return F.linear(inputs, self.weight.to(x.dtype), self.bias)


class ArrangedLinear(nn.Module):
    """``nn.Linear`` without bias whose file has rows or columns in another order than transformers.

    Weights inside a quant block cannot be reordered, so inputs and outputs are reordered instead.

    Args:
        parts: matrices (outputs of the part, in), which are stacked.
        rows: (out,), each output's row in the stacked parts; None if the order is the same.
        columns: (in,), each input's column in the parts; None if the order is the same.

    Attributes:
        places: (in,), the inverse of ``columns``: for each column of the parts the index of its input; or None."""

    rows: torch.Tensor | None
    columns: torch.Tensor | None
    places: torch.Tensor | None

    def __init__(
        self, parts: Sequence[QuantizedMatrix], rows: torch.Tensor | None = None, columns: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = sum(part.shape[0] for part in parts), parts[0].shape[1]
        linears = [StoredLinear(part) for part in parts]
        for linear in linears:
            linear.saved_by_parent = True
        self.parts = nn.ModuleList(linears)
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("columns", columns, persistent=False)
        self.register_buffer("places", None if columns is None else columns.argsort(), persistent=False)

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @property
    def weight(self) -> torch.Tensor:
        """The matrix in float32, dequantised at each access."""
        matrix = torch.cat([part.weight for part in self.parts if isinstance(part, StoredLinear)])
        matrix = matrix if self.rows is None else matrix[self.rows]
        return matrix if self.columns is None else matrix[:, self.columns]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes x (..., in) -> (..., out), in x's dtype."""
        if self.places is not None:
            x = x[..., self.places]
        products = [part(x) for part in self.parts]
        out = products[0] if len(products) == 1 else torch.cat(products, dim=-1)
        return out if self.rows is None else out[..., self.rows]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight


class StoredEmbedding(StoredWeights):
    """``nn.Embedding`` with a stored matrix, whose outputs are multiplied by ``scale`` (Gemma 3)."""

    dtype_sample: torch.Tensor

    def __init__(self, matrix: QuantizedMatrix, scale: float = 1.0) -> None:
        super().__init__(matrix)
        self.scale = scale
        self.num_embeddings, self.embedding_dim = matrix.shape
        # Has the dtype of the outputs, as a cast of the model casts this buffer too.
        self.register_buffer("dtype_sample", torch.empty(0, **CPU_FLOAT32), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Looks up ids (...) -> (..., size)."""
        rows = dequantize(self.matrix.select_rows(ids.flatten()))
        rows = rows.to(self.dtype_sample.dtype).view(*ids.shape, self.embedding_dim)
        return rows if self.scale == 1.0 else rows * torch.tensor(self.scale, dtype=rows.dtype, device="cpu")


def stored_module(module: nn.Module, matrix: QuantizedMatrix, bias: torch.Tensor | None = None) -> StoredWeights:
    """Makes a module with a stored matrix, which replaces the ``nn.Linear`` or ``nn.Embedding`` ``module``."""
    if isinstance(module, nn.Embedding):
        return StoredEmbedding(matrix, getattr(module, "scalar_embed_scale", 1.0))
    return StoredLinear(matrix, None if bias is None else bias.detach().float())


def layer_matrix(module: nn.Module) -> QuantizedMatrix | None:
    """Returns the matrix (out, in) of a layer with stored weights, its rows in the layer's order; None for another
    module, and for a layer whose columns have another order or whose parts have several formats."""
    if isinstance(module, StoredLinear):
        return None if module.saved_by_parent else module.matrix
    if not isinstance(module, ArrangedLinear) or module.columns is not None:
        return None
    matrices = [part.matrix for part in module.parts if isinstance(part, StoredLinear)]
    if len({matrix.format for matrix in matrices}) > 1:
        return None
    data = torch.cat([matrix.data for matrix in matrices])
    return QuantizedMatrix(data if module.rows is None else data[module.rows], matrices[0].format)


def dequantize(matrix: QuantizedMatrix | Planes) -> torch.Tensor:
    """Returns the matrix in float32."""
    if isinstance(matrix, Planes):
        return planes.dequantize(matrix)
    cpu_kernels = kernels() if matrix.data.device.type == "cpu" else None
    return matrix.dequantize() if cpu_kernels is None else cpu_kernels.dequantize(matrix)


def weight_storage(module: nn.Module) -> torch.Tensor:
    """Returns the first plain tensor that holds a module's weights; for a DTensor, of this process's shard."""
    if isinstance(module, PlanesLinear):
        return module.quants
    weight = module.data if isinstance(module, StoredWeights) else getattr(module, "weight", None)
    weight = weight if isinstance(weight, torch.Tensor) else next(module.parameters())
    return next(storage_tensors(local_tensor(weight)))


def weight_shape(module: nn.Module) -> tuple[int, int]:
    """Returns (out, in) of a layer, or (vocabulary, size) of an embedding."""
    if isinstance(module, StoredWeights):
        return module.matrix.shape
    if isinstance(module, PlanesLinear):
        return module.planes.shape
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor) and is_plain_tensor(weight):
        return weight.shape[0], weight.shape[1]
    # A weight that another package quantised may have a packed shape.
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    return int(module.out_features), int(module.in_features)  # type: ignore[arg-type]


def storage_tensors(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the plain tensors that hold a weight. A quantised tensor subclass may consist of several."""
    names = getattr(weight, "__tensor_flatten__", None)
    if names is None or is_plain_tensor(weight):
        yield weight.detach()
    else:
        for part in (getattr(weight, name) for name in names()[0]):
            yield from storage_tensors(part) if isinstance(part, torch.Tensor) else ()


def has_weights(module: nn.Module) -> bool:
    """True if a module has stored weights, or parameters of its own."""
    return isinstance(module, StoredWeights | PlanesLinear) or any(True for _ in module.parameters(recurse=False))


def weight_sample(module: nn.Module) -> torch.Tensor:
    """Returns evenly spaced elements of a module's stored matrix, or else of its first parameter."""
    if not isinstance(module, StoredWeights):
        # parameters() yields a module's own parameters before those of its children.
        weight = module.weight if isinstance(module, PlanesLinear) else next(module.parameters()).detach()
        flat = next(storage_tensors(full_tensor(weight))).flatten()
        return flat[:: max(1, flat.numel() // _NUM_SAMPLES)]
    matrix = module.matrix
    rows, size = matrix.shape
    indices = torch.arange(0, rows * size, max(1, rows * size // _NUM_SAMPLES), device=module.data.device)
    return dequantize(matrix.select_rows(indices // size))[torch.arange(len(indices), device="cpu"), indices % size]


def quantize_rows(weights: torch.Tensor | QuantizedMatrix, target_format: Literal["Q4_0", "Q8_0"]) -> QuantizedMatrix:
    """Rounds a matrix (out, in) to quant blocks, some rows at a time. The rows must be whole blocks."""
    chunks: Iterable[torch.Tensor] = weights.data.split(_QUANTIZE_CHUNK_ROWS)
    if isinstance(weights, QuantizedMatrix):
        chunks = (dequantize(QuantizedMatrix(chunk, weights.format)) for chunk in chunks)
    return QuantizedMatrix(torch.cat([quantize_blocks(chunk, target_format) for chunk in chunks]), target_format)


def quantize_for_draft(
    weights: torch.Tensor | QuantizedMatrix | Planes, bits: Literal[4, 8] = 8
) -> torch.Tensor | QuantizedMatrix:
    """Quantises a draft's matrix (out, in) for int8 arithmetic: drafts need not be exact.

    A matrix of more than ``bits + 1`` bits a weight (with the bits of the scales) is rounded to Q4_0 or Q8_0. If the
    length of its rows is no multiple of the block size, the result is a tensor of floats."""
    if isinstance(weights, Planes):
        weights = dequantize(weights)
    if isinstance(weights, QuantizedMatrix) and weights.bits_per_weight <= bits + 1:
        return weights.with_int8(int8=True)
    if weights.shape[1] % _QUANT_BLOCK:
        return weights.detach().contiguous() if isinstance(weights, torch.Tensor) else dequantize(weights)
    target_format: Literal["Q4_0", "Q8_0"] = "Q4_0" if bits == 4 else "Q8_0"
    matrix, cpu_kernels = quantize_rows(weights, target_format).with_int8(int8=True), kernels()
    return cpu_kernels.repack(matrix) if cpu_kernels is not None and cpu_kernels.can_repack(matrix) else matrix


def quantized_draft_bytes(weights: torch.Tensor | QuantizedMatrix, bits: Literal[4, 8] = 8) -> int:
    """Returns the number of bytes that :func:`quantize_for_draft` allocates: for the matrix and a repacked copy."""
    rows, size = weights.shape
    if size % _QUANT_BLOCK or (isinstance(weights, QuantizedMatrix) and weights.bits_per_weight <= bits + 1):
        return 0
    return 2 * rows * size // _QUANT_BLOCK * QUANT_SIZES["Q4_0" if bits == 4 else "Q8_0"][1]
