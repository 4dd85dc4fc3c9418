"""The structures Matrix, KVCache, Layer, Stack and Batch of kernels.h, made of tensors. Classes keep these alive."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from longdraft.native.boundary import address
from longdraft.native.header import STRUCTURES, Int64, Pointer
from longdraft.native.int8_kv import KV_DTYPE_IDS, Int8KV, KVTensor
from longdraft.native.quantized_matrix import QuantizedMatrix

# A matrix (out, in), in float32 or stored, and its bias.
LinearWeights = tuple[torch.Tensor | QuantizedMatrix, torch.Tensor | None]


Matrix, SoftmaxParams, KVCache = (STRUCTURES[name] for name in ("Matrix", "Scoring", "KeysValues"))


def matrix_struct(
    weights: LinearWeights, out: torch.Tensor | None = None, in_features: int | None = None
) -> ctypes.Structure:
    """A matrix, its bias, and the place of its products.

    Args:
        size: of the rows that are multiplied with it; None if that was checked.
    """
    w, bias = weights
    if in_features not in (None, w.shape[1]):
        raise TypeError(f"rows of {in_features} numbers are multiplied with a matrix {tuple(w.shape)}")
    if isinstance(w, QuantizedMatrix):
        number, (place, row, int8) = w.format_id, w.kernel_address()
    else:
        number, (place, row, int8) = 0, (address(w, strided_rows=True), w.stride(0) * w.itemsize, 0)
    return Matrix(place, address(bias, min_numel=w.shape[0]), address(out), row, w.shape[0], 0, number, int8)


def kv_struct(keys: KVTensor, values: KVTensor) -> ctypes.Structure:
    """keys, values: (layers, slots, num_kv_heads, capacity, d), both of a dtype of :data:`FORMATS`."""
    scales: tuple[int | None, int | None, int, int, int] = (None, None, 0, 0, 0)
    if isinstance(keys, Int8KV) and isinstance(values, Int8KV):
        layer, slot, head, _ = keys.scales.stride()
        scales = (address(keys.scales, strided_rows=True), address(values.scales, strided_rows=True), layer, slot, head)
        keys, values = keys.quants, values.quants
    assert isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor)
    k, v = keys.stride(), values.stride()
    if keys.shape != values.shape or (v[4] != 1 and values is not keys):
        raise TypeError(f"kernels take values by row, shaped like keys {keys.shape}; got {values.shape}, {v}")
    places = (address(x if x.stride(4) == 1 else x.mT, keys.dtype, strided_rows=True) for x in (keys, values))
    return KVCache(*places, k[0], v[0], *k[1:], *v[1:4], KV_DTYPE_IDS[keys.dtype], *scales)


# Rows of a prompt above which the kernels compute attention chunk by chunk (MANY in layer.cpp).
FEW_TOKENS = 32

NORM_NAMES = ("norm", "mlp_norm", "post_attn_norm", "post_mlp_norm", "q_norm", "k_norm")


# The weight of a norm and its epsilon.
Norm = tuple[torch.Tensor, float]


Own = TypeVar("Own", bound="StackLayer")


class HasStruct(Protocol):
    """Keeps alive what its structure points to."""

    struct: ctypes.Structure


@dataclass(eq=False)
class StackLayer:
    """A layer of a :class:`DecoderStack`.

    Attributes:
        is_recurrent: it keeps a state in the place of keys and values.
        norms, products: as the kind of layer has them.
        struct: its structure, which points into them.
    """

    is_recurrent: ClassVar[bool]
    norms: Mapping[str, Norm]
    projections: Sequence[LinearWeights]
    struct: ctypes.Structure = field(init=False)

    @property
    def hidden_size(self) -> int:
        """The size of its rows."""
        return self.norms["norm"][0].shape[0]

    def map_weights(self: Own, transform: Callable[[LinearWeights], LinearWeights]) -> Own:
        """The layer with other weights."""
        return replace(self, projections=[transform(product) for product in self.projections])


@dataclass(eq=False)
class DecoderLayer(StackLayer):
    """A decoder layer of the Llama kind: RMS norm, attention with RoPE, RMS norm, gated MLP. Or of the Gemma kind, with
    norms behind the attention and the MLP too.

    Attributes:
        norms: name -> norm, for some of :data:`NORM_NAMES`: for the inputs of the attention ("norm") and the MLP, for their
            outputs ("post_attn_norm", "post_mlp_norm"), each (hidden,), and for each head's queries and keys (d,).
        products: q, k, v, o, gate, up and down projection. If q gives twice the heads' sizes, the second half of each
            head's numbers are gates, whose sigmoids multiply the attention's output.
        heads, num_kv_heads, d: query heads, KV heads, head size, a multiple of 16.
        scale: the softmax scale.
        softcap: of the attention's scores; None for no cap.
        sinks: (heads,) scores that join the softmax's denominator; None for none.
        gelu: True if the MLP's gate goes through GELU by tanh, False for SiLU.
        norm_weight_offset: added to the norms' weights: 1 in Gemma's.
    """

    is_recurrent = False
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    gelu: bool = False
    norm_weight_offset: float = 0.0

    def __post_init__(self) -> None:
        heads, d, projections = self.num_heads, self.head_dim, self.projections
        self.sinks = None if self.sinks is None else self.sinks.detach().float().contiguous()
        own = [self.norms.get(name) for name in NORM_NAMES]
        self.struct = STRUCTURES["Layer"](
            *(address(n and n[0], min_numel=size) for n, size in zip(own, (*[self.hidden_size] * 4, d, d), strict=True)),
            *(0.0 if n is None else n[1] for n in own),
            self.norm_weight_offset, SoftmaxParams(self.scale, self.softcap or 0.0, address(self.sinks, min_numel=heads)),
            *map(matrix_struct, projections), self.hidden_size, heads, self.num_kv_heads, d, projections[4][0].shape[0], self.gelu,
            projections[0][0].shape[0] == 2 * heads * d,
        )  # fmt: skip


@dataclass(eq=False)
class DecoderStack:
    """Consecutive decoder layers, optionally with the final norm and the head.

    Attributes:
        kv_group_ids: for each layer the number of its kind: of the rows, keys and values that a call gives for it. None if
            all layers are of one kind.
        index_in_group: for each layer its place among the layers of these keys and values, or among the recurrent layers; None
            if it is the layer's number.
        softcap: of the logits; None for no cap.
        plus: added to the norm's weight.
    """

    layers: Sequence[StackLayer]
    norm: Norm | None = None
    head: LinearWeights | None = None
    kv_group_ids: Sequence[int] | None = None
    index_in_group: Sequence[int] | None = None
    softcap: float | None = None
    plus: float = 0.0

    def __post_init__(self) -> None:
        layers, count, hidden = self.layers, len(self.layers), self.layers[0].hidden_size
        structures = [ctypes.addressof(layer.struct) for layer in layers]
        self._alive: list[ctypes.Array[Any]] = [
            (Pointer * count)(*(s if x.is_recurrent == kind else None for s, x in zip(structures, layers, strict=True)))
            for kind in (False, True)
        ]
        self._alive += [
            (Int64 * count)(*x) for x in (self.kv_group_ids or [0] * count, self.index_in_group or range(count))
        ]
        weight, eps = (None, 0.0) if self.norm is None else (address(self.norm[0], min_numel=hidden), self.norm[1])
        self.struct = STRUCTURES["Stack"](
            *map(ctypes.addressof, self._alive), count, hidden, weight, eps, self.plus, self.softcap or 0.0,
            Matrix() if self.head is None else matrix_struct(self.head),
        )  # fmt: skip

    @property
    def vocab_size(self) -> int:
        """Rows of the head, or 0."""
        return 0 if self.head is None else self.head[0].shape[0]

    def map_weights(
        self,
        transform: Callable[[LinearWeights], LinearWeights],
        head_transform: Callable[[LinearWeights], LinearWeights] | None = None,
    ) -> DecoderStack:
        """The layers and the head with other weights. ``head_transform`` changes the head's; None to use ``transform``."""
        head = None if self.head is None else (head_transform or transform)(self.head)
        return replace(self, layers=[layer.map_weights(transform) for layer in self.layers], head=head)


@dataclass(eq=False)
class AttentionMetadata:
    """The rows of one forward: T rows for each of B sequences, and the places of their keys and values.

    Attributes:
        cos, sin: (B, T, turned), RoPE of the first dimensions of a head; turned may be 0.
        slots, first, ends: B numbers each: slot in the store, row of the first new key, keys with the new ones.
        mask: (B, T, width) bool, True where a row sees one of the last keys; None if it sees all.
        prompt: True for causal rows of a prompt, without a mask.
        begins: (B, T) int32, the first rank that a row sees, as :meth:`Kernels.attend` counts; None if rows see their
            path from its start.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    slots: Sequence[int]
    kv_write_start: Sequence[int]
    kv_lens: Sequence[int]
    mask: torch.Tensor | None
    prefill: bool = False
    window_start: torch.Tensor | None = None

    def __post_init__(self) -> None:
        sequences, size, turned = self.cos.shape
        numbers = [(Int64 * sequences)(*x) for x in (self.slots, self.kv_write_start, self.kv_lens)]
        mask = None if self.mask is None else self.mask.contiguous()
        begins = None if self.window_start is None else self.window_start.int().contiguous()
        cos, sin = self.cos.contiguous(), self.sin.contiguous()
        self._alive = cos, sin, numbers, mask, begins
        self.struct = STRUCTURES["Batch"](
            sequences, size, address(cos), address(sin, min_numel=cos.numel()), turned,
            *(ctypes.addressof(x) for x in numbers), address(mask, torch.bool), address(begins, torch.int32),
            0 if mask is None else mask.shape[-1], self.prefill,
        )  # fmt: skip
