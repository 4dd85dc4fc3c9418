"""Models whose weights stay as they are stored: linear layers and the embedding keep the bytes of the file.

There are two arithmetics. In float32 the layers compute the same bits as with unpacked weights: our kernels multiply a
few rows and unpack in registers, and torch multiplies many rows with a matrix that is unpacked for it. In int8 the
input rows are rounded to eight bits (:func:`longdraft.native.quantized_matrix.rounded_to_int8`) and our kernels multiply
integers, for any number of rows; a prompt's rows meet weights in bfloat16 where a processor has tiles for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from longdraft.model.hosting import in_prefill
from longdraft.model.skinny_gemm import MAX_SKINNY_ROWS, is_plain_tensor
from longdraft.model.tensor_parallel import full_tensor, local_tensor
from longdraft.native import Kernels, QuantizedMatrix, kernels
from longdraft.native.boundary import CPU_FLOAT32
from longdraft.native.quantized_matrix import QUANT_SIZES, fake_quantize_int8, quantize_blocks

_SAMPLED = 64  # weights of a layer that name a model
_TOGETHER = 4096  # rows of a draft's matrix that are rounded at a time, which bounds the memory for a large head


class StoredWeights(nn.Module):
    """A module with a frozen stored matrix: (out, in) of a layer, or (tokens, size) of an embedding.

    Attributes:
        rows_per_matrix: outputs of each matrix, where several lie one behind the other.
        saved_by_parent: the module around it saves it.
    """

    data: torch.Tensor
    rows_per_matrix: int | None = None
    saved_by_parent: bool = False

    def __init__(self, matrix: QuantizedMatrix) -> None:
        super().__init__()
        self.format, self.int8, self._woven = matrix.format, matrix.int8, matrix.repacked
        self.register_buffer("data", matrix.data, persistent=False)

    @property
    def matrix(self) -> QuantizedMatrix:
        return QuantizedMatrix(self.data, self.format, self.int8, self._woven)

    def repack(self, own: Kernels, place: torch.Tensor) -> None:
        """Lays the matrix out for int8 arithmetic in so many bytes of memory."""
        self._woven = own.repack(self.matrix, place).repacked

    @property
    def weight(self) -> torch.Tensor:
        """The matrix in float32, unpacked in every call."""
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
        """:func:`longdraft.model.skinny_gemm.weights_of` looks for this attribute."""
        return self.matrix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., in) -> (..., out), in x's dtype."""
        own = kernels() if x.device.type == "cpu" and x.dtype == torch.float32 else None
        if own is not None and (self.int8 or x.numel() <= MAX_SKINNY_ROWS * x.shape[-1]):
            with torch._C.DisableTorchFunction():  # what the kernel is handed is exact by row as it is
                return own.linear(x, [(self.matrix, self.bias)], prompt=in_prefill())[0]
        rows = fake_quantize_int8(x, self.format).to(x.dtype) if self.int8 else x
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
        self, parts: Sequence[QuantizedMatrix], rows: torch.Tensor | None = None, columns: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = sum(part.shape[0] for part in parts), parts[0].shape[1]
        products = [StoredLinear(part) for part in parts]
        for product in products:
            product.saved_by_parent = True
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

    def __init__(self, matrix: QuantizedMatrix, scale: float = 1.0) -> None:
        super().__init__(matrix)
        self.scale = scale
        self.num_embeddings, self.embedding_dim = matrix.shape
        # Has the dtype that the model is cast to, which is that of the results.
        self.register_buffer("like", torch.empty(0, **CPU_FLOAT32), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids (...) -> (..., size)."""
        rows = dequantize(self.matrix.select_rows(ids.flatten()))
        rows = rows.to(self.like.dtype).view(*ids.shape, self.embedding_dim)
        return rows if self.scale == 1.0 else rows * torch.tensor(self.scale, dtype=rows.dtype, device="cpu")


def stored_module(module: nn.Module, matrix: QuantizedMatrix, bias: torch.Tensor | None = None) -> StoredWeights:
    """A layer or an embedding with a stored matrix, for one of torch's."""
    if isinstance(module, nn.Embedding):
        return StoredEmbedding(matrix, getattr(module, "scalar_embed_scale", 1.0))
    return StoredLinear(matrix, None if bias is None else bias.detach().float())


def repack_for_int8(stored: QuantizedMatrix) -> QuantizedMatrix:
    """A stored matrix with a copy for int8 arithmetic, where kernels can make one: :meth:`Kernels.repack`."""
    own = kernels()
    return own.repack(stored) if own is not None and own.can_repack(stored) else stored


def dequantize(stored: QuantizedMatrix) -> torch.Tensor:
    """A stored matrix in float32."""
    own = kernels() if stored.data.device.type == "cpu" else None
    return stored.dequantize() if own is None else own.dequantize(stored)


def weight_storage(module: nn.Module) -> torch.Tensor:
    """The tensor that holds the weights of a layer or an embedding, for comparison of its storage."""
    weight = module.data if isinstance(module, StoredWeights) else getattr(module, "weight", None)
    return next(
        storage_tensors(local_tensor(weight if isinstance(weight, torch.Tensor) else next(module.parameters())))
    )


def weight_shape(module: nn.Module) -> tuple[int, int]:
    """(out, in) of a layer, (tokens, size) of an embedding."""
    if isinstance(module, StoredWeights):
        return module.matrix.shape
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor) and is_plain_tensor(weight):
        return weight.shape[0], weight.shape[1]
    # Quantised by another package, perhaps in another shape.
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    return int(module.out_features), int(module.in_features)  # type: ignore[arg-type]


def storage_tensors(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors in memory that a tensor consists of: several of a subclass, in which another package quantised it."""
    names = getattr(weight, "__tensor_flatten__", None)
    if names is None or is_plain_tensor(weight):
        yield weight.detach()
    else:
        for inner in (getattr(weight, name) for name in names()[0]):
            yield from storage_tensors(inner) if isinstance(inner, torch.Tensor) else ()


def weight_sample(module: nn.Module) -> torch.Tensor:
    """Some evenly spread weights of a module's first parameter, in any storage."""
    if not isinstance(module, StoredWeights):
        # Those of a layer within come after its own.
        flat = next(storage_tensors(full_tensor(next(module.parameters()).detach()))).flatten()
        return flat[:: max(1, flat.numel() // _SAMPLED)]
    matrix = module.matrix
    rows, size = matrix.shape
    places = torch.arange(0, rows * size, max(1, rows * size // _SAMPLED), device=module.data.device)
    return dequantize(matrix.select_rows(places // size))[torch.arange(len(places), device="cpu"), places % size]


def quantize_for_draft(
    weights: torch.Tensor | QuantizedMatrix, bits: Literal[4, 8] = 8
) -> torch.Tensor | QuantizedMatrix:
    """A draft's matrix (out, in) for int8 arithmetic, as a draft need not be exact.

    Args:
        bits: a matrix with more bits than these, and those of scales, is rounded to Q4_0 or Q8_0.

    Returns:
        Floats if a row is no whole number of blocks.
    """
    if isinstance(weights, QuantizedMatrix) and weights.bits_per_weight <= bits + 1:
        return weights.with_int8(int8=True)
    if weights.shape[1] % 32:
        return weights.detach().contiguous() if isinstance(weights, torch.Tensor) else dequantize(weights)
    kind: Literal["Q4_0", "Q8_0"] = "Q4_0" if bits == 4 else "Q8_0"
    rows = weights.data.split(_TOGETHER)
    floats = (
        dequantize(QuantizedMatrix(x, weights.format)) if isinstance(weights, QuantizedMatrix) else x for x in rows
    )
    return repack_for_int8(QuantizedMatrix(torch.cat([quantize_blocks(x, kind) for x in floats]), kind, int8=True))


def quantized_draft_bytes(weights: torch.Tensor | QuantizedMatrix, bits: Literal[4, 8] = 8) -> int:
    """Bytes of what :func:`quantize_for_draft` makes, which is laid out for vectors too; 0 if it makes nothing."""
    rows, size = weights.shape
    if size % 32 or (isinstance(weights, QuantizedMatrix) and weights.bits_per_weight <= bits + 1):
        return 0
    return 2 * rows * size // 32 * QUANT_SIZES["Q4_0" if bits == 4 else "Q8_0"][1]
