"""Builds the structures of kernels.h for decoder layers (``struct``) from tensors, and keeps the tensors alive."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from longdraft.native.boundary import address
from longdraft.native.header import CONSTANTS, ENUMS, STRUCTURES, Int64, Pointer
from longdraft.native.int8_kv import KV_DTYPE_IDS, Int8KV, KVTensor
from longdraft.native.quantized_matrix import QuantizedMatrix

# A linear layer: its weight (out, in), float32 or quantized, and its bias (out,) or None.
LinearWeights = tuple[torch.Tensor | QuantizedMatrix, torch.Tensor | None]
Transform = Callable[[LinearWeights], LinearWeights]

Matrix, SoftmaxParams, KVCache = (STRUCTURES[name] for name in ("Matrix", "SoftmaxParams", "KVCache"))


def matrix_struct(
    weights: LinearWeights, out: torch.Tensor | None = None, in_features: int | None = None
) -> ctypes.Structure:
    """Returns the structure Matrix of a linear layer. out: memory for its outputs; None: C++ sets it. in_features: the
    number of features that the weight must have; None: not checked."""
    w, bias = weights
    if in_features not in (None, w.shape[1]):
        raise TypeError(f"inputs of {in_features} features do not fit a weight (out, in) = {tuple(w.shape)}")
    if isinstance(w, QuantizedMatrix):
        format_id, (data, stride, int8_layout) = w.format_id, w.kernel_address()
    else:
        format_id = ENUMS["Format"]["FLOAT32"]
        data, stride, int8_layout = address(w, strided_rows=True), w.stride(0) * w.itemsize, 0
    bias_data = address(bias, min_numel=w.shape[0])
    return Matrix(data, bias_data, address(out), stride, w.shape[0], 0, format_id, int8_layout)


def kv_struct(keys: KVTensor, values: KVTensor) -> ctypes.Structure:
    """Returns the structure KVCache of keys and values (layers, slots, num_kv_heads, capacity, head_dim), of a dtype in
    :data:`KV_DTYPE_IDS`."""
    scales: tuple[int | None, int | None, int, int, int] = (None, None, 0, 0, 0)
    if isinstance(keys, Int8KV) and isinstance(values, Int8KV):
        layer, slot, head, _ = keys.scales.stride()
        scales = (address(keys.scales, strided_rows=True), address(values.scales, strided_rows=True), layer, slot, head)
        keys, values = keys.quants, values.quants
    assert isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor)
    k, v = keys.stride(), values.stride()
    if keys.shape != values.shape or (v[4] != 1 and values is not keys):
        raise TypeError(f"values must be contiguous, shaped like keys {keys.shape}; got {values.shape}, strides {v}")
    data = (address(x if x.stride(4) == 1 else x.mT, keys.dtype, strided_rows=True) for x in (keys, values))
    return KVCache(*data, k[0], v[0], *k[1:], *v[1:4], KV_DTYPE_IDS[keys.dtype], *scales)


# Prompts of more tokens than this use longdraft_attend_prefill.
FEW_TOKENS = CONSTANTS["FEW_TOKENS"]

# In the order of the structure DecoderLayer.
NORM_NAMES = ("norm", "mlp_norm", "post_attn_norm", "post_mlp_norm", "q_norm", "k_norm")

# Weight and epsilon of an RMS norm.
Norm = tuple[torch.Tensor, float]
Layer = TypeVar("Layer", bound="StackLayer")


class HasStruct(Protocol):
    """An object that has a ctypes structure, and keeps alive the memory that the structure points to."""

    struct: ctypes.Structure


@dataclass(eq=False)
class StackLayer:
    """A layer of a :class:`DecoderStack`.

    Attributes:
        is_recurrent: True: the layer has a recurrent state instead of a KV cache.
        norms: name -> weight and epsilon.
        projections: the linear layers, in the order that the subclass describes.
        struct: the layer's structure in kernels.h, which points to the memory of norms and projections.
    """

    is_recurrent: ClassVar[bool]
    norms: Mapping[str, Norm]
    projections: Sequence[LinearWeights]
    struct: ctypes.Structure = field(init=False)

    @property
    def hidden_size(self) -> int:
        """Size of the residual stream."""
        return self.norms["norm"][0].shape[0]

    def map_weights(self: Layer, transform: Transform) -> Layer:
        """Returns a copy of the layer, with ``transform`` applied to each projection."""
        return replace(self, projections=[transform(weights) for weights in self.projections])


@dataclass(eq=False)
class DecoderLayer(StackLayer):
    """A decoder layer like Llama's: RMS norm, attention with RoPE, RMS norm, gated MLP. Layers like Gemma's have
    additional norms after the attention and the MLP.

    Attributes:
        norms: before the attention "norm" and before the MLP "mlp_norm" (hidden_size,); optional: after them
            "post_attn_norm" and "post_mlp_norm"; for each head's queries and keys "q_norm" and "k_norm" (head_dim,).
        projections: q, k, v, o, gate, up, down. If q has 2 * num_heads * head_dim outputs, the second half of a head's
            outputs is a gate, whose sigmoid multiplies the attention's output.
        num_heads, num_kv_heads, head_dim: number of query heads; of KV heads; size of a head, a multiple of 16.
        scale, softcap, sinks: as in :meth:`Kernels.attend`; sinks (num_heads,).
        gelu: True: the MLP's activation is GELU by tanh; False: SiLU.
        norm_weight_offset: added to the norms' weights; 1 for Gemma.
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
        d, projections = self.head_dim, self.projections
        q_features, intermediate_size = projections[0][0].shape[0], projections[4][0].shape[0]
        self.sinks = None if self.sinks is None else self.sinks.detach().float().contiguous()
        norms = [self.norms.get(name) for name in NORM_NAMES]
        sizes = (*[self.hidden_size] * 4, d, d)
        self.struct = STRUCTURES["DecoderLayer"](
            *(address(norm and norm[0], min_numel=size) for norm, size in zip(norms, sizes, strict=True)),
            *(0.0 if norm is None else norm[1] for norm in norms),
            self.norm_weight_offset,
            SoftmaxParams(self.scale, self.softcap or 0.0, address(self.sinks, min_numel=self.num_heads)),
            *map(matrix_struct, projections), self.hidden_size, self.num_heads, self.num_kv_heads, d,
            intermediate_size, self.gelu, q_features == 2 * self.num_heads * d,
        )  # fmt: skip


@dataclass(eq=False)
class DecoderStack:
    """Consecutive decoder layers, optionally with the final norm and the LM head.

    Attributes:
        norm, head: the final norm and the LM head; None: the stack has none.
        kv_group_ids: id of each layer's KV group. Layers of a group share metadata and a KV cache, as in vLLM. None:
            all layers are in one group.
        index_in_group: index of each layer in its group's KV cache; of a recurrent layer, among the recurrent ones.
            None: the index in ``layers``.
        softcap: replaces logits x by softcap * tanh(x / softcap); None: no cap.
        norm_weight_offset: added to the final norm's weight; 1 for Gemma.
    """

    layers: Sequence[StackLayer]
    norm: Norm | None = None
    head: LinearWeights | None = None
    kv_group_ids: Sequence[int] | None = None
    index_in_group: Sequence[int] | None = None
    softcap: float | None = None
    norm_weight_offset: float = 0.0

    def __post_init__(self) -> None:
        num_layers, hidden_size = len(self.layers), self.layers[0].hidden_size
        # Attention layers, then recurrent layers: null where a layer is of the other kind.
        self._keepalive: list[ctypes.Array[Any]] = [
            (Pointer * num_layers)(
                *(ctypes.addressof(x.struct) if x.is_recurrent == is_recurrent else None for x in self.layers)
            )
            for is_recurrent in (False, True)
        ]
        indices = self.kv_group_ids or [0] * num_layers, self.index_in_group or range(num_layers)
        self._keepalive += [(Int64 * num_layers)(*x) for x in indices]
        weight, eps = (None, 0.0) if self.norm is None else (address(self.norm[0], min_numel=hidden_size), self.norm[1])
        self.struct = STRUCTURES["DecoderStack"](
            *map(ctypes.addressof, self._keepalive), num_layers, hidden_size, weight, eps, self.norm_weight_offset,
            self.softcap or 0.0, Matrix() if self.head is None else matrix_struct(self.head),
        )  # fmt: skip

    @property
    def vocab_size(self) -> int:
        """Number of outputs of the head; 0 without a head."""
        return 0 if self.head is None else self.head[0].shape[0]

    def map_weights(self, transform: Transform, head_transform: Transform | None = None) -> DecoderStack:
        """Returns a copy with ``transform`` applied to projections and head; head_transform: for the head instead."""
        head = None if self.head is None else (head_transform or transform)(self.head)
        return replace(self, layers=[layer.map_weights(transform) for layer in self.layers], head=head)


@dataclass(eq=False)
class AttentionMetadata:
    """Positions, slots, lengths and mask of a forward for one KV group: T new tokens in each of B sequences.

    Attributes:
        cos, sin: (B, T, rotary_dim); RoPE rotates the first rotary_dim dimensions of a head; rotary_dim may be 0.
        slots: slot of each sequence in the KV cache.
        kv_write_start: index of each sequence's first new KV entry.
        kv_lens: number of each sequence's KV entries, including new ones.
        mask: (B, T, width) bool, True where a token sees one of the last ``width`` entries; tokens see all entries
            before these. None: tokens see all entries.
        prefill: True: the tokens are a prompt's, with causal attention and no mask.
        window_start: (B, T) int32, as in :meth:`Kernels.attend`; None: no window.
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
        num_sequences, query_len, rotary_dim = self.cos.shape
        numbers = [(Int64 * num_sequences)(*x) for x in (self.slots, self.kv_write_start, self.kv_lens)]
        mask = None if self.mask is None else self.mask.contiguous()
        window_start = None if self.window_start is None else self.window_start.int().contiguous()
        cos, sin = self.cos.contiguous(), self.sin.contiguous()
        self._keepalive = cos, sin, numbers, mask, window_start
        self.struct = STRUCTURES["AttentionMetadata"](
            num_sequences, query_len, address(cos), address(sin, min_numel=cos.numel()), rotary_dim,
            *(ctypes.addressof(x) for x in numbers), address(mask, torch.bool), address(window_start, torch.int32),
            0 if mask is None else mask.shape[-1], self.prefill,
        )  # fmt: skip
